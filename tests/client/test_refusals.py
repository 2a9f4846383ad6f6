"""§8: every refusal has its next action, and no two of them can loop."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from gapless.client import http
from gapless.errors import ConnectionGaveUpError, RefusedError, SessionEndedError
from gapless.protocol.client import Client, Phase, Retry
from gapless.protocol.cursor import EventId
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import (
    CloseStream,
    Delete,
    Failed,
    Get,
    Input,
    Knock,
    Leave,
    Move,
    Negotiate,
    Offered,
    Opened,
    Over,
    Post,
    Received,
    Refused,
    Send,
    Settle,
    SocketClosed,
    Start,
    StreamEnded,
    Submit,
)
from gapless.protocol.refusal import ENDED, Action, Reason, Refusal
from tests.client.machine import LINK0, Hand, event_data

ATTEMPTS = 4
REQUESTS = (Get, Knock, Negotiate)


def refused(hand: Hand, reason: Reason) -> Refused:
    refusal = Refusal(reason, reason.value, committed=9, floor=5, received=0)
    return Refused(hand.client.attempt, refusal.row.status, refusal, retry_after=0.0)


def at(phase: Phase, steps: int = 1) -> Hand:
    """A machine in this phase, with a request waiting for its answer."""
    hand = Hand(Client("auto", steps=2 if phase is Phase.NEGOTIATING else 1, retry=Retry(attempts=ATTEMPTS)))
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    hand.arrive(hand.emit(event_data(1)))
    if phase is Phase.LISTENING:
        hand.put(StreamEnded(hand.client.stream or 0))
        hand.tick()
    else:
        hand.take()
    assert hand.client.phase is phase
    return hand


@pytest.mark.rule("L7")
@pytest.mark.parametrize("phase", [Phase.LISTENING, Phase.NEGOTIATING, Phase.KNOCKING])
def test_no_two_refusals_in_turn_can_loop(phase: Phase) -> None:
    for first, second in itertools.product(Reason, Reason):
        refuse_in_turn(phase, (first, second))


def refuse_in_turn(phase: Phase, pair: tuple[Reason, Reason]) -> None:
    hand = at(phase)
    answers = itertools.cycle(pair)
    asked = 0
    while hand.client.phase is not Phase.OVER:
        if hand.client.phase in (Phase.LISTENING, Phase.NEGOTIATING, Phase.KNOCKING):
            asked += 1
            hand.put(refused(hand, next(answers)))
        elif hand.client.phase is Phase.RESTING:
            hand.tick()
        else:
            assert hand.client.phase is Phase.STREAMING, "settled on the stream it had"
            return
        assert asked <= ATTEMPTS + 1, f"{pair}: more requests than the budget, without progress"
    assert [e.id for e in hand.effects if isinstance(e, Settle)] == [1], "what was open is settled, once"
    assert isinstance(hand.last(Over).error, SessionEndedError | RefusedError | ConnectionGaveUpError)


@pytest.mark.rule("L7")
@pytest.mark.parametrize("reason", [r for r in Reason if Refusal(r, "").row.action is Action.NEW_SESSION])
def test_a_refusal_that_ends_the_session_settles_and_deletes_where_it_may_live(reason: Reason) -> None:
    hand = at(Phase.LISTENING)
    hand.put(refused(hand, reason))
    assert hand.client.phase is Phase.OVER
    assert [e.data["reason"] for e in hand.effects if isinstance(e, Settle)] == ["outcome-unknown"]
    assert any(isinstance(e, Delete) for e in hand.effects) == (reason not in ENDED)


def opening(session: str | None = None) -> Hand:
    """A machine that has a request to send, and has not been told where to number from."""
    cursor = None if session is None else EventId(0, 0, LINK0)
    hand = Hand(Client(session=session, cursor=cursor, retry=Retry(attempts=0)))
    hand.put(Start())
    hand.submit({"id": 1, "method": "tools/call"})
    return hand


@pytest.mark.rule("L7", "L6")
@pytest.mark.parametrize(
    ("session", "end", "cause"),
    [
        (None, Leave(), "closed"),
        (None, Leave(ConnectionGaveUpError("in 10 seconds")), "gave-up"),
        (None, Failed(1, "no route"), "gave-up"),
        (None, Refused(1, 404, None), "not-gapless"),
        (None, Refused(1, 401, None), "unauthenticated"),
        (None, Refused(1, 403, Refusal(Reason.ORIGIN_FORBIDDEN, "")), "origin-forbidden"),
        ("token", Refused(1, 404, Refusal(Reason.SESSION_UNKNOWN, "")), "session-unknown"),
        ("token", Leave(), "closed"),
    ],
)
def test_a_client_that_ends_before_it_could_send_says_that_requests_were_not_sent(
    session: str | None, end: Input, cause: str
) -> None:
    hand = opening(session)
    hand.put(end)
    assert hand.client.phase is Phase.OVER
    (told,) = (effect for effect in hand.effects if isinstance(effect, Settle))
    assert told.data == {"reason": "not-sent", "cause": cause}
    assert told.message.endswith("; this was not sent")
    assert not any(isinstance(effect, Post) for effect in hand.effects)


@pytest.mark.rule("L6")
def test_refusals_that_each_use_a_number_are_no_standstill() -> None:
    hand = Hand(Client("never", retry=Retry(attempts=2)))
    hand.open()
    for n in range(1, 6):
        hand.submit({"id": n, "method": "tools/call"})
        post = hand.last(Post)
        assert post.messages[0].number == n
        hand.put(Refused(post.attempt, 429, Refusal(Reason.LIMIT, "many", received=n), 1.0))
        assert hand.client.outgoing.received == n
        hand.tick()
    assert hand.client.error is None


@pytest.mark.rule("L7", "L6")
@pytest.mark.parametrize("received", [0, 1])
def test_a_refusal_that_would_be_the_last_straw_settles_its_request(received: int) -> None:
    hand = Hand(Client("never", retry=Retry(attempts=2)))
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    for _ in range(2):
        hand.put(Failed(hand.last(Post).attempt, "reset"))
        hand.tick()
    refusal = Refusal(Reason.TOO_LARGE, "no", received=received)
    hand.put(Refused(hand.last(Post).attempt, 413, refusal, None))
    assert [e.id for e in hand.effects if isinstance(e, Settle)] == [1]


@pytest.mark.rule("L7")
def test_a_session_that_is_opened_too_late_is_deleted() -> None:
    hand = opening()
    assert not any(isinstance(effect, Delete) for effect in hand.put(Leave()))
    opened = Opened(hand.client.attempt, "token", EventId(0, 0, LINK0))
    assert hand.put(opened) == [Delete()]
    assert hand.client.session == "token"
    assert hand.put(opened) == []
    assert hand.client.phase is Phase.OVER


def test_an_evicted_cursor_that_has_moved_on_is_stated_again() -> None:
    hand = at(Phase.LISTENING)
    hand.take()
    refusal = Refusal(Reason.CURSOR_EVICTED, "", committed=9, floor=1)
    hand.put(Refused(hand.client.attempt, 409, refusal))
    hand.tick()
    assert hand.last(Get).cursor == hand.id(1)


def test_an_evicted_cursor_at_the_door_drains_the_stream_that_is_open() -> None:
    hand = at(Phase.KNOCKING)
    hand.put(refused(hand, Reason.CURSOR_EVICTED))
    assert hand.client.phase is Phase.STREAMING


@pytest.mark.rule("U6")
def test_after_a_426_in_one_step_the_stream_goes_on_and_the_door_is_left_alone() -> None:
    hand = at(Phase.KNOCKING)
    hand.put(refused(hand, Reason.UPGRADE_UNAVAILABLE))
    for n in range(2, 6):
        hand.arrive(hand.emit(event_data(n)))
        hand.take()
        hand.now += 1000
    assert hand.client.phase is Phase.STREAMING
    assert sum(isinstance(e, Knock) for e in hand.effects) == 1


@pytest.mark.rule("U6")
def test_after_a_426_in_two_steps_the_session_is_given_up_for_a_new_one() -> None:
    hand = at(Phase.NEGOTIATING)
    hand.put(Offered(hand.client.attempt, "ticket"))
    hand.put(refused(hand, Reason.UPGRADE_UNAVAILABLE))
    assert isinstance(hand.client.error, SessionEndedError)
    assert any(isinstance(e, Delete) for e in hand.effects)


@pytest.mark.rule("U6")
def test_two_foreign_answers_to_one_ticket_count_as_426() -> None:
    hand = at(Phase.NEGOTIATING)
    hand.put(Offered(hand.client.attempt, "ticket"))
    hand.put(Refused(hand.client.attempt, 502, None))
    hand.tick()
    hand.put(Refused(hand.client.attempt, 502, None))
    assert isinstance(hand.client.error, SessionEndedError)


@pytest.mark.rule("B3")
def test_a_handshake_without_an_answer_is_repeated_with_its_ticket() -> None:
    hand = at(Phase.NEGOTIATING)
    hand.put(Offered(hand.client.attempt, "ticket"))
    for _ in range(ATTEMPTS - 1):
        hand.put(Failed(hand.client.attempt, "reset"))
        hand.tick()
        assert hand.last(Knock).ticket == "ticket"


@pytest.mark.rule("U7", "U9")
def test_a_negotiation_without_an_answer_is_repeated_with_its_nonce() -> None:
    hand = at(Phase.NEGOTIATING)
    nonce = hand.last(Negotiate).nonce
    hand.put(Failed(hand.client.attempt, "reset"))
    hand.tick()
    assert hand.last(Negotiate).nonce == nonce


@pytest.mark.rule("U9")
def test_after_a_spent_ticket_the_stream_is_resumed_and_a_new_nonce_may_be_made() -> None:
    hand = at(Phase.NEGOTIATING)
    nonce = hand.last(Negotiate).nonce
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.put(refused(hand, Reason.TICKET_SPENT))
    hand.tick()
    hand.listen()
    hand.arrive(hand.emit(event_data(2)))
    hand.now += 100
    hand.take()
    assert hand.last(Negotiate).nonce != nonce


@pytest.mark.parametrize("untaken", [False, True])
def test_fenced_once_it_resumes_and_meeting_a_live_socket_then_it_raises(untaken: bool) -> None:
    hand = at(Phase.KNOCKING)
    hand.bind(1)
    if untaken:
        hand.arrive(hand.emit(event_data(2)))
    hand.put(SocketClosed(hand.client.socket or 0, 4410))
    assert (hand.take() is not None) == untaken
    hand.tick()
    hand.put(refused(hand, Reason.WEBSOCKET_BOUND))
    assert hand.client.error is not None
    assert hand.client.error.code == Reason.WEBSOCKET_BOUND
    assert not any(isinstance(e, Delete) for e in hand.effects), "the session is somebody else's by now"


@pytest.mark.parametrize("code", [1000, 1001, 1006, 1012, 1013, 4401, 4408, 4409])
def test_a_socket_that_goes_for_a_passing_reason_is_followed_by_sse(code: int) -> None:
    hand = at(Phase.KNOCKING)
    hand.bind(1)
    hand.put(SocketClosed(hand.client.socket or 0, code))
    hand.tick()
    assert hand.client.phase is Phase.LISTENING
    assert hand.last(Get).cursor == hand.id(1)


@pytest.mark.rule("U4", "L7", "B4")
@pytest.mark.parametrize(
    ("reason", "code"),
    [
        *((reason.value, reason.value) for reason in sorted(ENDED)),
        ("", "session-ended"),
    ],
)
def test_a_socket_closed_4404_ends_the_session_for_its_reason_and_settles(reason: str, code: str) -> None:
    hand = at(Phase.KNOCKING)
    hand.bind(1)
    hand.put(SocketClosed(hand.client.socket or 0, 4404, reason))
    assert isinstance(hand.client.error, SessionEndedError)
    assert hand.client.error.code == code
    assert code in str(hand.client.error)
    assert [e.id for e in hand.effects if isinstance(e, Settle)] == [1]


def posting() -> tuple[Hand, Post]:
    """A machine whose POST of message 1 is under way."""
    hand = Hand(Client("never", retry=Retry(attempts=ATTEMPTS)))
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    return hand, hand.last(Post)


@pytest.mark.rule("L6")
@pytest.mark.parametrize("reason", list(Reason))
def test_a_post_refused_again_and_again_comes_to_an_end(reason: Reason) -> None:
    hand, post = posting()
    for _ in range(ATTEMPTS + 2):
        refusal = Refusal(reason, reason.value, received=0)
        hand.put(Refused(post.attempt, refusal.row.status, refusal))
        if hand.client.phase is Phase.OVER or any(isinstance(e, Settle) for e in hand.effects):
            return
        hand.tick()
        post = hand.last(Post)
    pytest.fail("the message is sent for ever")


@pytest.mark.rule("L6", "W5")
def test_a_413_before_the_whole_was_read_is_followed_by_a_placeholder() -> None:
    hand, post = posting()
    hand.put(Refused(post.attempt, 413, Refusal(Reason.TOO_LARGE, "too large", received=0)))
    assert [(e.id, e.data["reason"]) for e in hand.effects if isinstance(e, Settle)] == [(1, "too-large")]
    hand.tick()
    (kept,) = hand.last(Post).messages
    assert (kept.number, kept.data) == (1, b"")


@pytest.mark.rule("L6", "W5")
def test_a_413_that_comes_once_the_message_went_over_a_socket_blames_nothing() -> None:
    """A proxy has refused the POST; what the socket carried may have been received under that number."""
    hand = at(Phase.KNOCKING)
    post = hand.last(Post)
    hand.bind(1)
    (sent,) = [e for e in hand.effects if isinstance(e, Send) and b"tools/call" in e.frame]
    hand.put(Refused(post.attempt, 413, None))
    hand.now += 1
    while hand.client.deadline is not None and hand.client.deadline <= hand.now:
        hand.tick()
    again = [e.frame for e in hand.effects if isinstance(e, Send) and e.frame.startswith(b"id: 1\n")]
    assert set(again) == {sent.frame}, "the same again, if anything"
    assert not any(isinstance(e, Settle) for e in hand.effects)


@pytest.mark.rule("L6")
def test_a_413_that_used_the_number_is_not_followed_by_anything() -> None:
    hand, post = posting()
    posts = sum(isinstance(e, Post) for e in hand.effects)
    hand.put(Refused(post.attempt, 413, Refusal(Reason.TOO_LARGE, "too large", received=1)))
    hand.now += 100
    while hand.client.deadline is not None and hand.client.deadline <= hand.now:
        hand.tick()
    assert sum(isinstance(e, Post) for e in hand.effects) == posts


@pytest.mark.rule("W5")
def test_a_message_above_the_limit_is_refused_before_it_is_sent() -> None:
    hand, _ = posting()
    effects = hand.submit({"id": 2, "method": "x" * 2000})
    assert [(e.id, e.data["reason"]) for e in effects if isinstance(e, Settle)] == [(2, "too-large")]
    assert not any(isinstance(e, Post) for e in effects)


def test_a_proxys_page_is_no_refusal_of_ours_and_the_session_survives_it() -> None:
    hand = at(Phase.LISTENING)
    for _ in range(2):
        hand.put(Refused(hand.client.attempt, 404, None))
        hand.tick()
    hand.listen()
    assert hand.client.phase is Phase.STREAMING
    assert not any(isinstance(e, Over | CloseStream) for e in hand.effects)


@pytest.mark.rule("L6", "W5")
def test_a_413_to_a_body_of_several_blames_none_of_them_until_they_are_sent_singly() -> None:
    hand, post = posting()
    for n in (2, 3):
        hand.submit({"id": n, "method": "a"})
    hand.put(Received(post.attempt, 1))
    post = hand.last(Post)
    assert [m.number for m in post.messages] == [2, 3]
    hand.put(Refused(post.attempt, 413, None))
    assert not any(isinstance(e, Settle) for e in hand.effects)
    hand.tick()
    for number in (2, 3):
        post = hand.last(Post)
        assert [m.number for m in post.messages] == [number]
        hand.put(Received(post.attempt, number))
    assert not any(isinstance(e, Settle) for e in hand.effects)


@pytest.mark.rule("U7", "U9", "B1")
def test_at_somebodys_acceptance_no_new_negotiation_is_begun() -> None:
    hand = Hand(Client("auto", steps=2))
    hand.open()
    body = b'{"negotiation":"another\'s","ticket":"theirs","url":"/x"}'
    hand.arrive(hand.emit(body, "upgrade-accepted"))
    hand.take()
    hand.put(Move())
    assert not any(isinstance(e, Negotiate) for e in hand.effects), "at U that would burn the session"
    assert hand.last(Knock).ticket == "theirs"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7),
        ("0", 0),
        ("9999", 60),
        (None, None),
        ("²", None),
        ("-1", None),
        ("9" * 5000, None),
        ("x", None),
    ],
)
def test_whatever_a_server_says_of_when_to_retry_the_client_goes_on(
    said: str | None, seconds: float | None
) -> None:
    """`²` is a digit to `str.isdigit`, and no number to `int`."""
    assert http.refused(1, 503, b"", said).retry_after == seconds


@pytest.mark.rule("W5", "L7")
def test_an_answer_that_is_too_large_for_the_server_is_replaced_by_an_error_under_its_id() -> None:
    """Or the MCP server would wait for it for as long as the session lives."""
    hand, _ = posting()
    hand.client.sending.limit = 1000
    big = b'{"jsonrpc":"2.0","id":"asked","result":{"text":"' + b"x" * 1000 + b'"}}'
    hand.put(Submit(big, peek(big)))
    (kept,) = hand.client.outgoing.due(None)
    said = msgspec.json.decode(kept.data)
    assert (said["id"], said["error"]["data"]["reason"]) == ("asked", "too-large")
