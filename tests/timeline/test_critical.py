"""Critical paths followed by hand, on simulated and on measured timelines."""

from __future__ import annotations

from fullbore.cost import Costs, StageCosts
from fullbore.ir import from_text
from fullbore.sim import simulate
from fullbore.timeline import Timeline, critical_path


def path(text: str, costs: Costs, *, overlap: bool = True) -> str:
    schedule = from_text(text)
    timeline = simulate(schedule, costs, overlap=overlap)
    return named(timeline, critical_path(timeline, schedule))


def named(timeline: Timeline, indices: list[int]) -> str:
    spans = list(timeline)
    return " ".join(str(spans[index].action) for index in indices)


def test_one_microbatch_goes_all_the_way_and_back():
    assert path("0F0,0B0\n1F0,1B0", Costs.uniform(stages=2, hop_s=0.5)) == (
        "0F0 0SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B0 0B0"
    )


def test_the_slow_rank_is_the_path():
    slow = StageCosts(forward_s=3, backward_s=5)
    costs = Costs(stages=(StageCosts(forward_s=1, backward_s=1), slow))
    assert path("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", costs) == (
        "0F0 0SEND_F0 1RECV_F0 1F0 1B0 1F1 1B1 1SEND_B1 0RECV_B1 0B1"
    )


def test_a_full_link_is_the_path():
    # 4 s a message: the third forward waits behind the first two on the link.
    costs = Costs.uniform(stages=2, message_bytes=4, bandwidth_bytes_per_s=1)
    assert path("0F0,0F1,0F2\n1F0,1F1,1F2", costs) == (
        "0F0 0SEND_F0 0SEND_F1 0SEND_F2 1RECV_F2 1F2"
    )


def test_a_send_that_blocks_is_on_the_path_without_its_receive():
    # Rank 0 waits 5 s for the arrival of its first message, then forwards microbatch 1.
    costs = Costs.uniform(stages=2, forward_s=1, hop_s=5)
    assert path("0F0,0F1\n1F0,1F1", costs, overlap=False) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 1RECV_F1 1F1"
    )


def test_a_message_that_was_there_is_not_on_the_path(draw):
    # Measured: taking 0F1's message takes rank 1 a moment, though it had arrived long before.
    timeline = draw(
        [
            ("0F0", 0.0, 1.0),
            ("0SEND_F0", 1.0, 1.1),
            ("0F1", 1.0, 2.0),
            ("0SEND_F1", 2.0, 2.1),
        ],
        [
            ("1RECV_F0", 0.0, 1.2),
            ("1F0", 1.21, 6.0),
            ("1RECV_F1", 6.0, 6.05),
            ("1F1", 6.06, 9.0),
        ],
    )
    found = critical_path(timeline, from_text("0F0,0F1\n1F0,1F1"))
    assert named(timeline, found) == "0F0 0SEND_F0 1RECV_F0 1F0 1F1"


def test_a_timeline_without_messages_still_has_a_path(draw):
    timeline = draw(
        [("0F0", 0.0, 1.0), ("0B0", 4.2, 5.0)],
        [("1F0", 1.1, 2.0), ("1B0", 2.0, 4.0)],
    )
    found = critical_path(timeline, from_text("0F0,0B0\n1F0,1B0"))
    assert named(timeline, found) == "0F0 1F0 1B0 0B0"


def test_nothing_computed_no_path(draw):
    timeline = draw([("0SEND_F0", 0.0, 1.0)], [])
    assert critical_path(timeline, from_text("0F0\n1F0")) == []
