"""The three decisions at the seam, as the public functions give them.

Each failure that three reports of the field observed is a test under its own name: (000) an upgrade
of a session that is not quiescent, (001) an upgrade without a cursor, (004) a resume at a durable,
unfinished upgrade. The functions that the reports propose are restated here, and ours must decide
as they do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gapless
from gapless import (
    CursorDiscontinuityError,
    McpSession,
    NonResumableUpgradeBoundaryError,
    Session,
    SessionMigrationGapError,
    SessionState,
    negotiate_upgrade,
    resume_sse_stream,
)
from gapless.protocol.seam import Boundary, Cover, EchoFault, boundary, cover, echo_fault

T = TypeVar("T")

SSE, PENDING = SessionState.SSE_ACTIVE, SessionState.UPGRADE_ACCEPTED_PENDING
BOUND, OVER = SessionState.WEBSOCKET_BOUND, SessionState.TERMINATED


def outcome(call: Callable[[], T]) -> T | type[Exception]:
    """What a call returns, or the type that it raises."""
    try:
        return call()
    except RuntimeError as error:
        return type(error)


# The first report: the replayable and the non-replayable -------------------------------------------


def _buffer(*numbers: int) -> dict[int, dict[str, Any]]:
    return {number: {"n": number} for number in numbers}


@pytest.mark.rule("U1", "U3")
def test_first_report_events_11_to_13_are_not_lost_by_an_unquiesced_upgrade() -> None:
    session = McpSession("s", 10, _buffer(*range(1, 14)))
    assert session.migrate_to_websocket(10) == [{"n": 11}, {"n": 12}, {"n": 13}]


@pytest.mark.rule("U1", "C5")
def test_first_report_an_evicted_gap_is_refused() -> None:
    session = McpSession("s", 10, _buffer(14, 15))
    with pytest.raises(SessionMigrationGapError, match="cannot cover the gap"):
        session.migrate_to_websocket(10)


@pytest.mark.parametrize("held", [(12, 13), (11, 13), (13,), (9, 10, 11, 13)])
@pytest.mark.rule("U1")
def test_first_report_a_gap_with_any_hole_is_refused(held: tuple[int, ...]) -> None:
    with pytest.raises(SessionMigrationGapError):
        McpSession("s", 10, _buffer(*held)).migrate_to_websocket(10)


@pytest.mark.parametrize("echoed", [11, 13, 9, 0, 14])
@pytest.mark.rule("C2", "C4")
def test_first_report_an_echoed_cursor_is_refused(echoed: int) -> None:
    session = McpSession("s", 10, _buffer(*range(1, 14)))
    with pytest.raises(SessionMigrationGapError, match="echoing a position"):
        session.migrate_to_websocket(echoed)


@pytest.mark.rule("U1", "U3")
def test_first_report_a_quiescent_session_migrates_with_an_empty_gap() -> None:
    assert McpSession("s", 13, _buffer(*range(1, 14))).migrate_to_websocket(13) == []
    assert McpSession("s", 0, {}).migrate_to_websocket(0) == []


@pytest.mark.rule("U1", "U3")
def test_first_report_events_emitted_until_the_migration_are_not_lost() -> None:
    """The buffer is the session's own: it goes on, and its oldest may go, even all of them."""
    buffer = _buffer(*range(1, 14))
    session = McpSession("s", 10, buffer)
    buffer |= _buffer(14, 15)
    assert session.migrate_to_websocket(10) == [{"n": n} for n in range(11, 16)]
    del buffer[11]
    with pytest.raises(SessionMigrationGapError, match="1 of 5 events are gone"):
        session.migrate_to_websocket(10)
    buffer.clear()
    with pytest.raises(SessionMigrationGapError, match="5 of 5 events are gone"):
        session.migrate_to_websocket(10)


@pytest.mark.rule("C5")
def test_first_report_a_client_past_all_that_was_emitted_is_refused() -> None:
    with pytest.raises(SessionMigrationGapError, match="past all that was emitted"):
        McpSession("s", 5, {}).migrate_to_websocket(5)


@pytest.mark.rule("U1")
def test_first_report_what_was_evicted_below_the_cursor_does_not_matter() -> None:
    session = McpSession("s", 10, _buffer(11, 12, 13))
    assert session.migrate_to_websocket(10) == [{"n": 11}, {"n": 12}, {"n": 13}]


@pytest.mark.rule("C4")
def test_first_report_a_session_knows_what_it_was_given_and_what_it_emitted_last() -> None:
    buffer = _buffer(3, 4)
    session = McpSession("token", 2, buffer)
    assert (session.session_id, session.last_ack_id, session.replay_buffer) == ("token", 2, buffer)
    assert session.last_emitted_id == 4
    assert McpSession("token", 0, {}).last_emitted_id == 0


def _reported_migration(last_ack_id: int, replay_buffer: dict[int, Any], client_cursor: int) -> list[Any]:
    last_emitted_id = max(replay_buffer) if replay_buffer else 0
    if client_cursor != last_ack_id:
        raise SessionMigrationGapError
    wanted = range(client_cursor + 1, last_emitted_id + 1)
    gap = [replay_buffer[number] for number in wanted if number in replay_buffer]
    if len(gap) != last_emitted_id - client_cursor:
        raise SessionMigrationGapError
    return gap


@pytest.mark.rule("U1")
@given(st.integers(0, 6), st.sets(st.integers(1, 6)), st.integers(0, 8))
def test_first_report_every_migration_is_decided_as_reported(ack: int, held: set[int], cursor: int) -> None:
    buffer = _buffer(*held)
    ours = outcome(lambda: McpSession("s", ack, buffer).migrate_to_websocket(cursor))
    assert ours == outcome(lambda: _reported_migration(ack, buffer, cursor))


# The second report: the cursor across the 101 ------------------------------------------------------


@pytest.mark.rule("U2")
def test_second_report_a_101_without_a_cursor_is_refused() -> None:
    """Events 48 to 51 were skipped for good: the client could not know that they existed."""
    with pytest.raises(CursorDiscontinuityError, match="carries no cursor"):
        negotiate_upgrade(47, 52, False, 0)


@pytest.mark.rule("U2")
def test_second_report_a_101_with_the_cursor_tells_where_the_websocket_starts() -> None:
    assert negotiate_upgrade(47, 52, True, 40) == 52


@pytest.mark.rule("U2")
def test_second_report_a_cursor_computed_before_the_drain_is_behind_the_client_and_refused() -> None:
    """The stale echo: by the time it is read the client has processed more than it claims."""
    with pytest.raises(CursorDiscontinuityError, match="lies behind"):
        negotiate_upgrade(50, 47, True, 0)


@pytest.mark.rule("U1", "C5")
def test_second_report_a_fallback_that_would_lose_events_is_refused() -> None:
    with pytest.raises(CursorDiscontinuityError, match="evicted"):
        negotiate_upgrade(47, 52, True, 48)
    assert negotiate_upgrade(47, 52, True, 47) == 52, "the floor itself is covered"


@pytest.mark.rule("U6")
def test_second_report_after_a_426_sse_resumes() -> None:
    """Nothing changed by the refusal: the session is where it was, and serves."""
    session = Session("token", SSE)
    assert resume_sse_stream(session, 47) is SSE
    assert session == Session("token", SSE)


def _reported_negotiation(prior: int, committed: int, echo: bool, floor: int) -> int:
    if not echo or committed < prior or floor > prior:
        raise CursorDiscontinuityError
    return committed


@pytest.mark.rule("U2")
@given(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.integers(0, 5))
def test_second_report_every_negotiation_is_decided_as_reported(
    prior: int, committed: int, echo: bool, floor: int
) -> None:
    ours = outcome(lambda: negotiate_upgrade(prior, committed, echo, floor))
    assert ours == outcome(lambda: _reported_negotiation(prior, committed, echo, floor))


# The third report: the one-way door ----------------------------------------------------------------


@pytest.mark.parametrize("cursor", [51, 52, 2**63 - 1])
@pytest.mark.rule("B1")
def test_third_report_an_idle_stream_at_the_boundary_is_an_end_instead(cursor: int) -> None:
    session = Session("token", PENDING, upgrade_event_id=51)
    with pytest.raises(NonResumableUpgradeBoundaryError, match="burned"):
        resume_sse_stream(session, cursor)
    assert session.state is OVER


@pytest.mark.rule("B1", "B4", "U7")
def test_third_report_a_second_upgrade_accepted_is_never_minted_for_a_stream_without_a_cursor() -> None:
    session = Session("token", PENDING, upgrade_event_id=51)
    with pytest.raises(NonResumableUpgradeBoundaryError):
        resume_sse_stream(session, None)
    assert session.state is OVER
    assert session.upgrade_event_id == 51
    for cursor in (None, 0, 50, 51):
        with pytest.raises(NonResumableUpgradeBoundaryError, match="over"):
            resume_sse_stream(session, cursor)


@pytest.mark.parametrize("cursor", [0, 1, 50])
@pytest.mark.rule("B2")
def test_third_report_a_resume_below_the_upgrade_is_safe(cursor: int) -> None:
    session = Session("token", PENDING, upgrade_event_id=51)
    assert resume_sse_stream(session, cursor) is PENDING
    assert session.state is PENDING


@pytest.mark.rule("B6")
def test_third_report_a_bound_session_serves_no_stream_and_is_not_burned_by_one() -> None:
    session = Session("token", BOUND, upgrade_event_id=51, handshake_complete=True)
    with pytest.raises(NonResumableUpgradeBoundaryError, match="bound to a WebSocket"):
        resume_sse_stream(session, 60)
    assert session.state is BOUND


@pytest.mark.rule("B7")
def test_third_report_after_the_socket_the_upgrade_is_history() -> None:
    session = Session("token", SSE, upgrade_event_id=51, handshake_complete=True)
    for cursor in (None, 50, 51, 60):
        assert resume_sse_stream(session, cursor) is SSE


@pytest.mark.parametrize(
    "session",
    [
        Session("token", PENDING, upgrade_event_id=None),
        Session("token", PENDING, upgrade_event_id=51, handshake_complete=True),
        Session("token", SSE, upgrade_event_id=51),
    ],
)
@pytest.mark.rule("B1")
def test_third_report_where_one_of_the_three_conditions_fails_resuming_is_safe(session: Session) -> None:
    state = session.state
    assert resume_sse_stream(session, 51) is state
    assert session.state is state


def _reported_resume(session: Session, last_event_id: int | None) -> SessionState:
    if session.state is OVER:
        raise NonResumableUpgradeBoundaryError
    pending = (
        session.upgrade_event_id is not None and not session.handshake_complete and session.state is PENDING
    )
    if pending and (last_event_id is None or last_event_id >= (session.upgrade_event_id or 0)):
        session.state = OVER
        raise NonResumableUpgradeBoundaryError
    if session.state is BOUND:
        raise NonResumableUpgradeBoundaryError
    return session.state


@pytest.mark.rule("B1", "B2", "B4")
@given(
    st.sampled_from(SessionState),
    st.none() | st.integers(0, 4),
    st.booleans(),
    st.none() | st.integers(0, 5),
)
def test_third_report_every_resume_is_decided_as_reported(
    state: SessionState, event: int | None, complete: bool, cursor: int | None
) -> None:
    ours, theirs = Session("t", state, event, complete), Session("t", state, event, complete)
    assert outcome(lambda: resume_sse_stream(ours, cursor)) == outcome(
        lambda: _reported_resume(theirs, cursor)
    )
    assert ours == theirs


# Names, signatures, errors -------------------------------------------------------------------------


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_names_and_signatures_are_those_of_the_reports() -> None:
    assert _parameters(McpSession) == ["session_id", "last_ack_id", "replay_buffer"]
    assert _parameters(McpSession.migrate_to_websocket) == ["self", "client_cursor"]
    assert _parameters(negotiate_upgrade) == [
        "prior_event_id",
        "committed_cursor",
        "echo_in_handshake",
        "replay_buffer_floor",
    ]
    assert _parameters(Session) == ["token", "state", "upgrade_event_id", "handshake_complete"]
    assert _parameters(resume_sse_stream) == ["session", "last_event_id"]
    assert {state.name: state.value for state in SessionState} == {
        "SSE_ACTIVE": "sse_active",
        "UPGRADE_ACCEPTED_PENDING": "upgrade_accepted_pending",
        "WEBSOCKET_BOUND": "websocket_bound",
        "TERMINATED": "terminated",
    }
    assert Session("t", SSE) == Session("t", SSE, None, False)


@pytest.mark.parametrize(
    "error", [SessionMigrationGapError, CursorDiscontinuityError, NonResumableUpgradeBoundaryError]
)
def test_the_errors_are_runtime_errors_with_a_code_and_a_hint(error: type[gapless.GaplessError]) -> None:
    assert issubclass(error, RuntimeError)
    raised = error("why")
    assert raised.code
    assert raised.hint
    assert raised.line == f"why ({raised.hint})"


# The decisions themselves --------------------------------------------------------------------------


@pytest.mark.rule("U1", "C5")
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_a_cursor_is_covered_exactly_if_every_event_after_it_is_there(
    cursor: int, floor: int, committed: int
) -> None:
    held = set(range(floor + 1, committed + 1))
    match cover(cursor, floor, committed):
        case Cover.COVERED:
            assert set(range(cursor + 1, committed + 1)) <= held
            assert cursor <= committed
        case Cover.EVICTED:
            assert cursor < floor
        case Cover.AHEAD:
            assert floor <= cursor
            assert cursor > committed


@pytest.mark.rule("U2")
def test_an_echo_is_at_fault_if_it_is_missing_behind_or_beyond_repair() -> None:
    assert echo_fault(5, None) is EchoFault.MISSING
    assert echo_fault(5, 4) is EchoFault.REGRESSED
    assert echo_fault(5, 9, floor=6) is EchoFault.EVICTED
    assert echo_fault(5, 5) is None
    assert echo_fault(5, 9, floor=5) is None
    assert echo_fault(0, 0) is None


@pytest.mark.parametrize(
    ("state", "event", "cursor", "expected"),
    [
        (SSE, None, None, Boundary.SERVE),
        (SSE, 5, 5, Boundary.SERVE),
        (PENDING, 5, None, Boundary.BURN),
        (PENDING, 5, 5, Boundary.BURN),
        (PENDING, 5, 6, Boundary.BURN),
        (PENDING, 5, 4, Boundary.DRAIN),
        (PENDING, 5, 0, Boundary.DRAIN),
        (BOUND, 5, None, Boundary.BOUND),
        (BOUND, 5, 4, Boundary.BOUND),
        (OVER, 5, 4, Boundary.ENDED),
        (OVER, None, None, Boundary.ENDED),
    ],
)
@pytest.mark.rule("B1", "B2", "B4", "B6")
def test_what_a_stream_gets_depends_on_the_state_and_on_which_side_of_u_it_is(
    state: SessionState, event: int | None, cursor: int | None, expected: Boundary
) -> None:
    assert boundary(state, event, cursor) is expected
