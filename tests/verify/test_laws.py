"""Each law by example: what is reported, where, and with which remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from making import schedule_of

from fullbore.errors import ScheduleError, VerificationError
from fullbore.ir import Placement, Program, Schedule
from fullbore.passes import insert_communication, split_backward
from fullbore.schedules import gpipe, interleaved, one_f_one_b, seq1f1b
from fullbore.verify import MOST_PER_RULE, RULES, check, report, verify


def two_ranks(first: str, second: str, *, microbatches: int = 1) -> Schedule:
    return schedule_of(first, second, placement=[0, 1], microbatches=microbatches)


def told(schedule: Schedule, **limits: float) -> list[str]:
    return [str(violation) for violation in verify(schedule, **limits)]


def test_every_rule_has_a_name_and_states_its_law_in_one_sentence() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.statement.endswith((".", ")", ")."))
        assert "\n" not in rule.statement


def test_rules_presume_rules_that_come_before_them() -> None:
    before: set[str] = set()
    for rule in RULES:
        assert before.issuperset(rule.presumes)
        before.add(rule.name)


def test_a_missing_forward() -> None:
    assert told(two_ranks("0F0 0B0", "1B0")) == [
        "rank 1, 1F0: complete: is missing: every stage needs one a microbatch; add it to rank 1"
    ]


def test_a_missing_backward() -> None:
    assert told(two_ranks("0F0", "1F0 1B0")) == [
        "rank 0, 0B0: complete: is missing: there is neither a B nor an I and a W; add it to rank 0"
    ]


def test_half_a_backward() -> None:
    assert told(two_ranks("0F0 0I0", "1F0 1I0 1W0")) == [
        "rank 0, 0W0: complete: is missing: I is there without it; add it to rank 0"
    ]
    assert "1I0: complete: is missing: W is there" in told(two_ranks("0F0 0B0", "1F0 1W0"))[0]


def test_a_whole_backward_beside_a_split_one() -> None:
    assert told(two_ranks("0F0 0B0 0W0", "1F0 1B0")) == [
        "rank 0, index 2, 0W0: complete: 0B0, a whole backward, is there too; "
        "delete one: either B, or I and W"
    ]


def test_an_action_twice() -> None:
    assert told(two_ranks("0F0 0F0 0B0", "1F0 1B0")) == [
        "rank 0, index 1, 0F0: complete: occurs a second time; delete one of the two"
    ]


def test_an_action_on_a_foreign_rank() -> None:
    assert told(two_ranks("0F0 1F0 0B0", "1B0")) == [
        "rank 0, index 1, 1F0: placed: stage 1 is on rank 1; "
        "move it to rank 1, or change the placement"
    ]


def test_stages_and_microbatches_that_do_not_exist() -> None:
    assert told(two_ranks("0F0 0B0 2F0", "1F0 1B0 1F7")) == [
        "rank 0, index 2, 2F0: known: there is no stage 2: stages are 0..1; "
        "correct the stage, or give it a rank in the placement",
        "rank 1, index 2, 1F7: known: there is no microbatch 7: microbatches are 0..0; "
        "correct the microbatch, or raise the schedule's number of them",
    ]


def test_negative_numbers_do_not_exist_either() -> None:
    made = gpipe(ranks=1, microbatches=1).programs[0]
    for wrong in (
        Program(kind=made.kind, stage=made.stage - np.int32(1), microbatch=made.microbatch),
        Program(kind=made.kind, stage=made.stage, microbatch=made.microbatch - np.int32(1)),
    ):
        schedule = Schedule(
            name="negative",
            microbatches=1,
            placement=Placement.looped(ranks=1),
            programs=(wrong,),
        )
        assert {violation.rule for violation in verify(schedule)} == {"known"}
        assert len(verify(schedule)) == 2


def test_a_backward_before_its_forward() -> None:
    assert told(two_ranks("0B0 0F0", "1F0 1B0")) == [
        "rank 0, index 0, 0B0: ordered: needs 0F0, which stands after it, at index 1; "
        "move 0F0 before it"
    ]


def test_a_weight_gradient_before_its_input_gradient() -> None:
    found = told(two_ranks("0F0 0W0 0I0", "1F0 1B0"))
    assert found[0].startswith("rank 0, index 1, 0W0: ordered: needs 0I0, which stands after it")


def test_stages_of_one_rank_out_of_order() -> None:
    found = told(schedule_of("1F0 0F0 1B0 0B0", placement=[0, 0], microbatches=1))
    assert found == [
        "rank 0, index 0, 1F0: ordered: needs 0F0, which stands after it, at index 1; "
        "move 0F0 before it"
    ]


def test_slices_of_a_sequence_out_of_order() -> None:
    lawful = seq1f1b(ranks=1, microbatches=1, slices=2)
    assert str(lawful.programs[0]) == "0F0 0F1 0B1 0B0" and told(lawful) == []
    backward = schedule_of("0F0 0F1 0B0 0B1", placement=[0], microbatches=2)
    assert told(backward) == []
    assert told(replace(backward, slices=2)) == [
        "rank 0, index 2, 0B0: ordered: needs 0B1, which stands after it, at index 3; "
        "move 0B1 before it"
    ]


def test_a_microbatch_on_the_other_copy_of_the_model() -> None:
    lawful = schedule_of("0F0 1F1 1B1 0B0", "1F0 0F1 1B0 0B1", placement=[0, 1], microbatches=2)
    both = replace(lawful, placement=Placement.both_ways(ranks=2))
    assert "stage 1 is on rank 1" in told(lawful)[0]
    assert told(both) == []
    swapped = replace(both, programs=both.programs[::-1])
    assert told(swapped)[0] == (
        "rank 0, index 0, 1F0: placed: stage 1 is on rank 1 for microbatches 0, 2, ...; move it to "
        "rank 1, or change the placement"
    )


def test_a_send_without_a_receive_and_the_other_way_round() -> None:
    assert told(two_ranks("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0")) == [
        "rank 1, 1RECV_F0: sent-and-received: is missing: stage 0 is on rank 0; add it to rank 1"
    ]
    assert told(two_ranks("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")) == [
        "rank 0, 0SEND_F0: sent-and-received: is missing: stage 1 is on rank 1; add it to rank 0"
    ]


def test_messages_to_nobody() -> None:
    channelled = insert_communication(two_ranks("0F0 0B0", "1F0 1B0"))
    for rank, extra in ((0, "0SEND_B0"), (0, "0RECV_F0"), (1, "1SEND_F0"), (1, "1RECV_B0")):
        rows = [str(program) for program in channelled.programs]
        rows[rank] += f" {extra}"
        expected = f"{extra}: sent-and-received: there is no such message"
        assert any(expected in text for text in told(two_ranks(*rows)))
    within = schedule_of("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", placement=[0, 0], microbatches=1)
    assert {violation.rule for violation in verify(within)} == {"sent-and-received"}


def test_a_message_sent_before_it_is_made_or_taken_after_it_is_needed() -> None:
    found = told(
        two_ranks("0SEND_F0 0F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0", microbatches=1)
    )
    assert [text.split(";")[0] for text in found] == [
        "rank 0, index 0, 0SEND_F0: ordered: needs 0F0, which stands after it, at index 1",
        "rank 1, index 0, 1F0: ordered: needs 1RECV_F0, which stands after it, at index 1",
    ]


def test_messages_taken_in_another_order_than_sent() -> None:
    found = told(
        two_ranks(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            microbatches=2,
        )
    )
    assert found == [
        "rank 1, index 0, 1RECV_F1: first-in-first-out: is taken before 1RECV_F0 (index 1), "
        "which rank 0 sends earlier; take 1RECV_F0 first, or swap the two sends"
    ]


def test_only_messages_of_one_direction_must_keep_their_order() -> None:
    check(
        schedule_of(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0",
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1 "
            "1RECV_B0 1B0 1SEND_B0",
            "2RECV_F0 2RECV_F1 2F1 2B1 2SEND_B1 2F0 2B0 2SEND_B0",
            placement=[0, 1, 2],
            microbatches=2,
        )
    )


def test_live_activations_over_the_limit() -> None:
    schedule = one_f_one_b(ranks=4, microbatches=6)
    check(schedule, peak_limit=4)
    check(schedule, peak_limit=[4, 3, 2, 1])
    assert told(schedule, peak_limit=3) == [
        "rank 0, index 3, 0F3: live-activations: raises live activations to 4 microbatches x "
        "1/P of the model, over the limit of 3 (the rank's peak is 4); put a backward before it, "
        "or raise the limit to 4"
    ]
    assert [v.rank for v in verify(schedule, peak_limit=[4, 2, 2, 0.5])] == [1, 3]


def test_virtual_stages_are_parts_of_the_rank_s_share() -> None:
    schedule = interleaved(ranks=4, microbatches=8, virtual_stages=2)
    check(schedule, peak_limit=5.5)
    assert [v.rank for v in verify(schedule, peak_limit=5.4)] == [0]
    check(insert_communication(schedule), peak_limit=[5.5, 4.5, 3.5, 2.5])


def test_a_split_backward_is_live_until_its_weight_gradient_is_done() -> None:
    schedule = split_backward(one_f_one_b(ranks=1, microbatches=3), delay=9)
    assert str(schedule.programs[0]) == "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"
    check(schedule, peak_limit=3)
    assert verify(schedule, peak_limit=2)[0].index == 4


def test_limits_are_judged_even_where_other_laws_are_broken() -> None:
    rules = [v.rule for v in verify(two_ranks("0F0", "1F0 1B0"), peak_limit=0.5)]
    assert rules == ["complete", "live-activations", "live-activations"]


def test_a_limit_for_each_rank_or_one_for_all() -> None:
    with pytest.raises(ScheduleError, match="one for each of the 2 ranks"):
        verify(gpipe(ranks=2, microbatches=2), peak_limit=[1.0, 2.0, 3.0])


def test_check_raises_with_every_violation_on_a_line() -> None:
    with pytest.raises(VerificationError) as error:
        check(two_ranks("0F0", "1B0"))
    assert len(str(error.value).splitlines()) == 2
    check(gpipe(ranks=2, microbatches=2))


def test_very_many_violations_are_counted_and_few_are_printed() -> None:
    half_a_million = interleaved(ranks=64, microbatches=1024, virtual_stages=4)
    backwards = replace(
        half_a_million,
        programs=tuple(p.select(np.arange(len(p))[::-1]) for p in half_a_million.programs),
    )
    found = verify(backwards)
    assert len(found) == MOST_PER_RULE
    lines = report(found, most=5).splitlines()
    assert len(lines) == 6
    assert lines[-1] == f"... and {MOST_PER_RULE - 5} more"
    with pytest.raises(VerificationError) as error:
        check(backwards)
    assert len(str(error.value)) < 10_000


def test_a_law_that_is_presumed_silences_those_built_on_it() -> None:
    rules = {v.rule for v in verify(two_ranks("0F0 0B0 9F9", "1F0"))}
    assert rules == {"known"}


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(ScheduleError, match="peak_limit is not a number"):
        verify(one_f_one_b(ranks=2, microbatches=2), peak_limit=float("nan"))
