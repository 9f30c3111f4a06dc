"""How long messages take: rings within and between nodes, exchanges of all with all, hops."""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.cost.hardware.device import Constants, Device

__all__ = ["Ring", "all_to_all_s", "collective_s", "turn_s"]

# How often each byte crosses a ring.
_TURNS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ranks of one group: how many, and how many of them share a node."""

    size: int
    in_node: int

    @property
    def leaves(self) -> bool:
        """Whether the group reaches beyond a node."""
        return self.in_node < self.size


def collective_s(
    kind: str,
    size_bytes: float,
    ring: Ring,
    device: Device,
    constants: Constants,
    *,
    copies: int = 1,
) -> float:
    """Seconds of a collective over the whole tensor of size_bytes, with nothing beside it.

    A ring of n moves (n-1)/n of the tensor a rank, an all_reduce twice that. Where the ring leaves
    the node, its k ranks in a node send out over k network shares at once, but no faster than the
    node itself. An all_to_all is another matter: see `all_to_all_s`, which copies is for.
    """
    if ring.size == 1 or size_bytes == 0:
        return 0.0
    if kind == "all_to_all":
        return all_to_all_s(size_bytes, ring, device, constants, copies=copies)
    turns = _TURNS[kind]
    moved = size_bytes * (ring.size - 1) / ring.size
    return turns * (moved / _ring_bytes_per_s(ring, device, constants)) + turns * _start_s(
        ring, constants
    )


def all_to_all_s(
    size_bytes: float, ring: Ring, device: Device, constants: Constants, *, copies: int = 1
) -> float:
    """Seconds in which each rank sends size_bytes, an equal part to every rank of the group.

    Parts for the own node and for other nodes travel at once, over the node and the network. Of
    copies of a token, one goes to each other node that has some of them, and on from there to each
    rank that has: n places get (1 - (1 - 1/n)^copies) of them each, by chance.
    """
    nodes = ring.size / ring.in_node
    to_a_rank = size_bytes / copies * _reached(ring.size, copies)
    within = to_a_rank * (ring.in_node - 1)
    beyond = to_a_rank * (ring.size - ring.in_node)
    if copies > 1:
        within = to_a_rank * (ring.size - nodes)  # what came from other nodes is passed on too
        beyond = size_bytes / copies * _reached(nodes, copies) * (nodes - 1)
    within_s = within / (device.node_bytes_per_s * constants.node_share)
    beyond_s = beyond / (device.network_bytes_per_s * constants.network_share)
    return max(within_s, beyond_s) + _start_s(ring, constants)


def turn_s(size_bytes: float, ring: Ring, device: Device, constants: Constants) -> float:
    """Seconds in which the parts of a tensor of size_bytes go round from neighbour to neighbour.

    All ranks send theirs at once, n - 1 times; where a message leaves the node it has the network
    share of one device.
    """
    if ring.size == 1:
        return 0.0
    per_s = min(device.node_bytes_per_s, device.pair_bytes_per_s) * constants.node_share
    if ring.leaves:
        per_s = min(per_s, device.network_bytes_per_s * constants.network_share)
    return (ring.size - 1) * (size_bytes / ring.size / per_s + constants.hop_s)


def _reached(places: float, copies: int) -> float:
    """Of a token's copies, how many go to one of so many places, counted once a place."""
    if copies == 1:
        return 1 / places
    return float(1 - (1 - 1 / places) ** copies)


def _ring_bytes_per_s(ring: Ring, device: Device, constants: Constants) -> float:
    within = device.node_bytes_per_s * constants.node_share
    if not ring.leaves:
        return within
    return min(within, ring.in_node * device.network_bytes_per_s * constants.network_share)


def _start_s(ring: Ring, constants: Constants) -> float:
    nodes = -(-ring.size // ring.in_node)
    crossing_s = (nodes - 1) * constants.network_step_s if ring.leaves else 0.0
    return constants.collective_s + crossing_s
