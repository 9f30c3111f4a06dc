"""Schedules for tests: drawn on a grid, drawn at random, changed by hand, judged by definition."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from fullbore.ir import Action, Kind, Placement, Program, Schedule

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
OFFLOAD, RELOAD = Kind.OFFLOAD, Kind.RELOAD
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B


def act(text: str) -> Action:
    return Action.parse(text)


def programs_of(schedule: Schedule) -> list[list[Action]]:
    return [list(program) for program in schedule.programs]


def with_programs(schedule: Schedule, programs: Iterable[Iterable[Action]]) -> Schedule:
    """The schedule with other programs, and its own placement and M."""
    return replace(schedule, programs=tuple(Program.of(actions) for actions in programs))


def schedule_of(*rows: str, placement: Iterable[int], microbatches: int) -> Schedule:
    """A schedule from a line of actions a rank, lawful or not."""
    return Schedule(
        name="by-hand",
        microbatches=microbatches,
        placement=Placement(stage_to_rank=tuple(placement)),
        programs=tuple(Program.of(act(text) for text in row.split()) for row in rows),
    )


def needs_of(action: Action, schedule: Schedule, present: set[Action]) -> list[Action]:
    """What an action needs, by the definition of a pipeline: the tests' own, for comparison."""
    step = {F: -1, B: 1, I: 1}.get(action.kind, 0)
    neighbour = action.microbatch + step
    carried = []
    if step and neighbour // schedule.slices == action.microbatch // schedule.slices:
        kinds = [F] if action.kind == F else [B, I]
        cells = [Action(stage=action.stage, kind=kind, microbatch=neighbour) for kind in kinds]
        carried = [cell for cell in cells if cell in present]
    return carried + _needs_of_its_microbatch(action, schedule, present)


def _needs_of_its_microbatch(
    action: Action, schedule: Schedule, present: set[Action]
) -> list[Action]:
    def near(kind: Kind, step: int = 0) -> Action:
        return Action(stage=action.stage + step, kind=kind, microbatch=action.microbatch)

    copies = [schedule.placement.stage_to_rank, *schedule.placement.copies]
    last, home = schedule.stages - 1, copies[action.microbatch % len(copies)]
    backward = I if near(I) in present else B
    kept = next(a for a in (near(RELOAD), near(Kind.R), near(F)) if a in present or a == near(F))
    match action.kind:
        case Kind.F if action.stage == 0:
            return []
        case Kind.F:
            crosses = home[action.stage - 1] != home[action.stage]
            return [near(RECV_F) if crosses and near(RECV_F) in present else near(F, -1)]
        case Kind.OFFLOAD | Kind.R:
            return [near(F)]
        case Kind.RELOAD:
            return [near(OFFLOAD)]
        case Kind.B | Kind.I if action.stage == last:
            return [kept]
        case Kind.B | Kind.I:
            crosses = home[action.stage + 1] != home[action.stage]
            below = near(I, 1) if near(I, 1) in present else near(B, 1)
            return [kept, near(RECV_B) if crosses and near(RECV_B) in present else below]
        case Kind.W:
            return [near(I)]
        case Kind.SEND_F:
            return [near(F)]
        case Kind.SEND_B:
            return [near(backward)]
        case Kind.RECV_F:
            return [near(SEND_F, -1)]
        case Kind.RECV_B:
            return [near(SEND_B, 1)]


def runs(schedule: Schedule) -> bool:
    """Whether a schedule in which every action occurs once can run: by sorting its whole graph."""
    present = {action for program in schedule.programs for action in program}
    graph: dict[Action, set[Action]] = defaultdict(set)
    for program in programs_of(schedule):
        for before, after in zip([None, *program], program, strict=False):
            graph[after] |= set(needs_of(after, schedule, present))
            graph[after] |= {before} if before else set()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return takes_in_order(schedule)


def takes_in_order(schedule: Schedule) -> bool:
    """Whether messages are taken as they were sent, on every directed pair of ranks."""
    copies = [schedule.placement.stage_to_rank, *schedule.placement.copies]
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    taken: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, program in enumerate(programs_of(schedule)):
        for action in program:
            if action.kind in (SEND_F, SEND_B):
                step, kind = (1, RECV_F) if action.kind == SEND_F else (-1, RECV_B)
                received = replace(action, stage=action.stage + step, kind=kind)
                home = copies[action.microbatch % len(copies)]
                sent[rank, home[received.stage]].append(received)
            if action.kind in (RECV_F, RECV_B):
                step = -1 if action.kind == RECV_F else 1
                home = copies[action.microbatch % len(copies)]
                taken[home[action.stage + step], rank].append(action)
    return sent == taken


def random_schedule(
    seed: int, *, ranks: int, stages: int, microbatches: int, split: float, away: float = 0.0
) -> Schedule:
    """A lawful schedule that nobody would write: ready actions in random order.

    Stages are put on ranks at random, at least one each. `split` is the share of backwards that
    are split into I and W, `away` that of activations with an OFFLOAD and a RELOAD.
    """
    dice = random.Random(seed)
    home = [*range(ranks), *(dice.randrange(ranks) for _ in range(stages - ranks))]
    dice.shuffle(home)
    cells = [(s, m) for s in range(stages) for m in range(microbatches)]
    actions = {Action(stage=s, kind=F, microbatch=m) for s, m in cells}
    for s, m in cells:
        kinds = (I, W) if dice.random() < split else (B,)
        kinds += (OFFLOAD, RELOAD) if away and dice.random() < away else ()
        actions |= {Action(stage=s, kind=kind, microbatch=m) for kind in kinds}
    empty = Schedule(
        name="random",
        microbatches=microbatches,
        placement=Placement(stage_to_rank=tuple(home)),
        programs=(),
    )
    graph = TopologicalSorter({a: needs_of(a, empty, actions) for a in sorted(actions)})
    graph.prepare()
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    ready = list(graph.get_ready())
    while ready:
        action = ready.pop(dice.randrange(len(ready)))
        programs[home[action.stage]].append(action)
        graph.done(action)
        ready += graph.get_ready()
    return with_programs(empty, programs)


def draw(schedule: Schedule, *, backward: int = 1, idle: str = "--") -> list[list[str]]:
    """The schedule on a grid of slots: a whole backward takes `backward`, all else one.

    Messages take no time. Returns a row a rank, cells such as `0F1` and idle ones, all equally
    long.
    """
    present = {action for program in schedule.programs for action in program}
    end: dict[Action, int] = {}
    rows: list[list[str]] = [[] for _ in schedule.programs]
    left = programs_of(schedule)
    while any(left):
        for row, program in zip(rows, left, strict=True):
            while program and all(need in end for need in needs_of(program[0], schedule, present)):
                action = program.pop(0)
                needs = needs_of(action, schedule, present)
                start = max((end[need] for need in needs), default=0)
                row += [idle] * (start - len(row))
                row += [str(action)] * (backward if action.kind == B else 1)
                end[action] = len(row)
    length = max(map(len, rows))
    return [row + [idle] * (length - len(row)) for row in rows]
