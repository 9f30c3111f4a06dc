"""The notation of one action."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore.errors import NotationError
from fullbore.ir import COMMUNICATION_KINDS, COMPUTE_KINDS, COPY_KINDS, Action, Kind

actions = st.builds(
    Action,
    stage=st.integers(0, 999_999_999),
    kind=st.sampled_from(Kind),
    microbatch=st.integers(0, 999_999_999),
)


@pytest.mark.parametrize(
    ("text", "stage", "kind", "microbatch"),
    [
        ("2F0", 2, Kind.F, 0),
        ("2B0", 2, Kind.B, 0),
        ("2I0", 2, Kind.I, 0),
        ("2W0", 2, Kind.W, 0),
        ("2SEND_F0", 2, Kind.SEND_F, 0),
        ("3RECV_F11", 3, Kind.RECV_F, 11),
        ("12SEND_B7", 12, Kind.SEND_B, 7),
        (" 0RECV_B1023 ", 0, Kind.RECV_B, 1023),
    ],
)
def test_every_kind_is_read(text: str, stage: int, kind: Kind, microbatch: int) -> None:
    assert Action.parse(text) == Action(stage=stage, kind=kind, microbatch=microbatch)


@given(actions)
def test_what_is_written_is_read_again(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F0", "2F", "2X0", "2f0", "-1F0", "2F-1", "2.5F0", "2F0x", "x2F0", "2 F0", "2FF0"),
        *("2SENDF0", "2SEND_0", "2UNSHARD", "1234567890F0", "2F1234567890", "٣F0", "²F0", "2F0,"),
    ],
)
def test_anything_else_is_refused_and_told_what_an_action_is(text: str) -> None:
    with pytest.raises(NotationError, match="such as 2F0"):
        Action.parse(text)


@given(st.text(max_size=12))
def test_text_is_an_action_or_a_notation_error(text: str) -> None:
    try:
        action = Action.parse(text)
    except NotationError:
        return
    assert int(text.strip().partition(action.kind.name)[0]) == action.stage


def test_long_garbage_is_cut_in_the_message() -> None:
    with pytest.raises(NotationError) as error:
        Action.parse("z" * 100_000)
    assert len(str(error.value)) < 300


def test_kinds_are_computation_copies_or_communication_in_this_order() -> None:
    assert [*COMPUTE_KINDS, *COPY_KINDS, *COMMUNICATION_KINDS] == list(Kind)
