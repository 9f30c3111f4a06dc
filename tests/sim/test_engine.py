"""The simulator against timelines drawn by hand."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from fullbore import passes, schedules
from fullbore.cost import Costs, StageCosts
from fullbore.errors import CostsError, VerificationError
from fullbore.ir import Kind, from_text
from fullbore.sim import simulate

GPIPE_2X3 = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2"
ONE_F_ONE_B_2X2 = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


def spans(text: str, costs: Costs, *, messages: bool = False, overlap: bool = True) -> str:
    """A simulated schedule as text: a row a rank of `action start-end`."""
    timeline = simulate(from_text(text), costs, overlap=overlap)
    rows: list[list[str]] = [[] for _ in range(timeline.ranks)]
    for span, compute in zip(timeline, timeline.is_compute, strict=True):
        if compute != messages:
            rows[span.rank].append(f"{span.action} {span.start_s:g}-{span.end_s:g}")
    return "\n".join("  ".join(row) for row in rows)


def test_one_f_one_b_by_hand():
    # rank 0  F0 F1 .. .. B0 B0 .. B1 B1
    # rank 1  .. F0 B0 B0 F1 B1 B1 .. ..
    assert spans(ONE_F_ONE_B_2X2, Costs.uniform(stages=2)) == (
        "0F0 0-1  0F1 1-2  0B0 4-6  0B1 7-9\n1F0 1-2  1B0 2-4  1F1 4-5  1B1 5-7"
    )


def test_every_message_takes_a_hop():
    costs = Costs.uniform(stages=2, hop_s=0.5)
    assert spans(ONE_F_ONE_B_2X2, costs) == (
        "0F0 0-1  0F1 1-2  0B0 5-7  0B1 8-10\n1F0 1.5-2.5  1B0 2.5-4.5  1F1 4.5-5.5  1B1 5.5-7.5"
    )


def test_messages_have_spans_of_their_own():
    # A RECV lasts while its rank waits; 1F1 came at 2.5 and is taken without waiting at 4.5.
    costs = Costs.uniform(stages=2, hop_s=0.5)
    assert spans(ONE_F_ONE_B_2X2, costs, messages=True) == (
        "0SEND_F0 1-1  0SEND_F1 2-2  0RECV_B0 2-5  0RECV_B1 7-8\n"
        "1RECV_F0 0-1.5  1SEND_B0 4.5-4.5  1RECV_F1 4.5-4.5  1SEND_B1 7.5-7.5"
    )


def test_messages_follow_each_other_on_a_link():
    # 2 s a message, 0.5 s on top: forwards enter the link at 1, 3, 5 and arrive at 3.5, 5.5, 7.5;
    # gradients leave rank 1 at 10.5, 12.5, 14.5 and arrive at 13, 15, 17.
    costs = Costs.uniform(stages=2, hop_s=0.5, message_bytes=2, bandwidth_bytes_per_s=1)
    assert spans(GPIPE_2X3, costs) == (
        "0F0 0-1  0F1 1-2  0F2 2-3  0B0 13-15  0B1 15-17  0B2 17-19\n"
        "1F0 3.5-4.5  1F1 5.5-6.5  1F2 7.5-8.5  1B0 8.5-10.5  1B1 10.5-12.5  1B2 12.5-14.5"
    )
    sends = spans(GPIPE_2X3, costs, messages=True).splitlines()[0].split("  ")[:3]
    assert sends == ["0SEND_F0 1-3", "0SEND_F1 2-5", "0SEND_F2 3-7"]


def test_opposite_directions_are_two_links():
    # The third forward's message and the first gradient's both travel from 5 to 7.
    costs = Costs.uniform(stages=2, backward_s=1, message_bytes=2, bandwidth_bytes_per_s=1)
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
    assert spans(text, costs) == (
        "0F0 0-1  0F1 1-2  0F2 2-3  0B0 7-8  0B1 9-10  0B2 11-12\n"
        "1F0 3-4  1B0 4-5  1F1 5-6  1B1 6-7  1F2 7-8  1B2 8-9"
    )


def test_one_link_serves_all_virtual_stages_of_a_pair():
    # Stages 0 and 2 on rank 0, 1 on rank 1, and 3 too: 0->1 and 2->3 share the link rank 0 -> 1.
    text = "0F0,2F0,0F1\n1F0,1F1,3F0"
    costs = Costs.uniform(stages=4, message_bytes=4, bandwidth_bytes_per_s=1)
    # 0F0 1, link to 5; 1F0 5-6, link to 10; 2F0 10-11, link to 15; 0F1 11-12 waits for it, to 19.
    assert spans(text, costs) == "0F0 0-1  2F0 10-11  0F1 11-12\n1F0 5-6  1F1 19-20  3F0 20-21"


def test_without_overlap_the_sender_stands_still():
    # rank 0  F0 s  F1 s  ...          each s is half a second of waiting for the arrival
    costs = Costs.uniform(stages=2, hop_s=0.5)
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert spans(text, costs, overlap=False) == (
        "0F0 0-1  0F1 1.5-2.5  0B0 6.5-8.5  0B1 9-11\n1F0 1.5-2.5  1F1 3-4  1B0 4-6  1B1 6.5-8.5"
    )
    assert spans(text, costs, overlap=False, messages=True).startswith(
        "0SEND_F0 1-1.5  0SEND_F1 2.5-3  0RECV_B0 3-6.5  0RECV_B1 8.5-9\n"
    )


def test_overhead_comes_before_every_compute_action():
    costs = Costs.uniform(stages=2, overhead_s=0.25)
    assert spans("0F0,0B0\n1F0,1B0", costs) == (
        "0F0 0.25-1.25  0B0 5-7\n1F0 1.5-2.5  1B0 2.75-4.75"
    )


def test_a_split_backward_sends_the_gradient_before_the_weights():
    costs = Costs.uniform(stages=2, input_grad_s=1, weight_grad_s=3)
    assert spans("0F0,0I0,0W0\n1F0,1I0,1W0", costs) == (
        "0F0 0-1  0I0 3-4  0W0 4-7\n1F0 1-2  1I0 2-3  1W0 3-6"
    )


def test_each_stage_has_its_own_times():
    costs = Costs(
        stages=(
            StageCosts(forward_s=1, backward_s=2),
            StageCosts(forward_s=3, backward_s=5),
        )
    )
    assert spans("0F0,0B0\n1F0,1B0", costs) == "0F0 0-1  0B0 9-11\n1F0 1-4  1B0 4-9"


def test_between_stages_of_one_rank_nothing_travels():
    costs = Costs.uniform(stages=2, hop_s=9)
    assert spans("0F0,1F0,1B0,0B0", costs) == "0F0 0-1  1F0 1-2  1B0 2-4  0B0 4-6"
    assert spans("0F0,1F0,1B0,0B0", costs, messages=True) == ""


def test_messages_taken_out_of_order_are_held():
    # Rank 1 wants microbatch 1 first: both messages are there, 1F1 starts when its own is.
    costs = Costs.uniform(stages=2, hop_s=0.5)
    assert spans("0F0,0F1\n1F1,1F0", costs) == "0F0 0-1  0F1 1-2\n1F1 2.5-3.5  1F0 3.5-4.5"


BUSY_LINKS = {"hop_s": 0.5, "message_bytes": 3, "bandwidth_bytes_per_s": 2, "overhead_s": 0.125}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(ranks=3, microbatches=4),
        schedules.one_f_one_b(ranks=4, microbatches=6),
        schedules.interleaved(ranks=2, microbatches=4, virtual_stages=3),
        schedules.looped_bfs(ranks=3, microbatches=4, virtual_stages=2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_written_out_messages_change_nothing(schedule, overlap):
    costs = Costs.uniform(stages=schedule.stages, **BUSY_LINKS)
    implied = simulate(schedule, costs, overlap=overlap)
    written = simulate(passes.insert_communication(schedule), costs, overlap=overlap)
    assert list(implied) == list(written)


def test_held_messages_change_no_compute():
    # Rank 1 takes the message of 0 too before it computes 1, and holds it.
    schedule = from_text("0F0,0F1\n1F1,1F0")
    costs = Costs.uniform(stages=2, **BUSY_LINKS)
    implied, written = (
        [span for span in simulate(s, costs) if span.action.kind == Kind.F]
        for s in (schedule, passes.insert_communication(schedule))
    )
    assert implied == written


def test_costs_must_have_an_entry_a_stage():
    with pytest.raises(CostsError, match="3 stages, the schedule has 2"):
        simulate(from_text(GPIPE_2X3), Costs.uniform(stages=3))


def test_a_split_backward_needs_times_for_its_halves():
    with pytest.raises(CostsError, match="input_grad_s and weight_grad_s"):
        simulate(from_text("0F0,0I0,0W0"), Costs.uniform(stages=1, backward_s=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0,0F0", "rank 0 cannot run 0B0: what it needs is done only after it"),
        ("0B0", "rank 0 cannot run 0B0: what it needs is never made"),
        ("0F0,0W0", "rank 0 cannot run 0W0: what it needs is never made"),
        ("0F0\n1F0,1F1", "rank 1 cannot run 1F1: what it needs is never made"),
        ("0F0,0F1\n1F0,1RECV_F1,1F1", "rank 1 cannot run 1RECV_F1: what it needs is never made"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(text, message):
    with pytest.raises(VerificationError, match=message):
        simulate(from_text(text), Costs.uniform(stages=text.count("\n") + 1))


def test_a_deadlock_is_refused_naming_who_waits_where():
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"
    with pytest.raises(VerificationError, match=r"deadlocks: rank 0 at 0B0, rank 1 at 1F1"):
        simulate(from_text(text), Costs.uniform(stages=2))


def test_compiled_and_plain_kernel_agree_bit_for_bit(monkeypatch):
    schedule = schedules.interleaved(ranks=4, microbatches=8, virtual_stages=2)
    costs = Costs.uniform(
        stages=8, forward_s=0.1, backward_s=0.3, hop_s=0.07, message_bytes=1, overhead_s=0.01
    ).model_copy(update={"bandwidth_bytes_per_s": 3.0})
    for overlap in (True, False):
        plain = simulate(schedule, costs, overlap=overlap)
        with monkeypatch.context() as patch:
            patch.setattr(import_module("fullbore.sim.engine"), "COMPILE_FROM_ACTIONS", 0)
            compiled = simulate(schedule, costs, overlap=overlap)
        for column in ("rank", "kind", "stage", "microbatch", "start_s", "end_s"):
            assert np.array_equal(getattr(plain, column), getattr(compiled, column)), column


def test_the_kernel_compiles_without_a_folder_for_its_cache(monkeypatch):
    import numba

    compile_in_memory = numba.njit

    def njit(*functions: object, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_in_memory(*functions)

    engine = import_module("fullbore.sim.engine")
    monkeypatch.setattr(numba, "njit", njit)
    monkeypatch.setattr(engine, "COMPILE_FROM_ACTIONS", 0)
    engine.compiled.cache_clear()
    try:
        timeline = simulate(from_text(ONE_F_ONE_B_2X2), Costs.uniform(stages=2))
    finally:
        engine.compiled.cache_clear()
    assert timeline.makespan_s == 9


def test_a_simulated_timeline_says_so():
    timeline = simulate(schedules.gpipe(ranks=2, microbatches=2), Costs.uniform(stages=2))
    assert (timeline.source, timeline.name, timeline.ranks) == ("simulated", "gpipe", 2)
    assert (np.diff(timeline.rank) >= 0).all()


@pytest.mark.parametrize("seconds", [1e308, 2e9, 1e-13, 5e-324])
@pytest.mark.filterwarnings("error")
def test_steps_that_no_clock_measures_are_refused(seconds):
    costs = Costs.uniform(stages=2, forward_s=seconds, backward_s=seconds)
    with pytest.raises(CostsError, match="give all costs in seconds"):
        simulate(schedules.gpipe(ranks=2, microbatches=2), costs)
    with pytest.raises(CostsError, match="give all costs in seconds"):
        simulate(
            schedules.gpipe(ranks=2, microbatches=2),
            Costs.uniform(stages=2, forward_s=0, backward_s=0, hop_s=seconds),
        )


def test_a_step_of_no_time_is_simulated():
    costs = Costs.uniform(stages=2, forward_s=0, backward_s=0)
    assert simulate(schedules.gpipe(ranks=2, microbatches=2), costs).makespan_s == 0


def test_only_stages_whose_backward_is_split_need_its_halves() -> None:
    """As where a schedule that was found splits some, and their times were measured."""
    schedule = from_text("0F0,0I0,0W0\n1F0,1B0\n")
    halved = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 2.0}
    whole = {"forward_s": 1.0, "backward_s": 2.0}
    timeline = simulate(schedule, Costs.parse({"stages": [halved, whole]}))
    assert timeline.makespan_s == 1 + 1 + 2 + 1 + 2
    with pytest.raises(CostsError, match="splits the backward of stage 0: give its input_grad_s"):
        simulate(schedule, Costs.parse({"stages": [whole, halved]}))
