"""C7, U2, U3, U4: the client checks continuity itself."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from gapless.errors import CursorDiscontinuityError, SessionMigrationGapError
from gapless.protocol.block import Block
from gapless.protocol.client import Client, Phase, Retry
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.moves import (
    CloseSocket,
    CloseStream,
    Delete,
    Delivered,
    Failed,
    Get,
    Move,
    Offered,
    Opened,
    Post,
    Received,
    Refused,
    Send,
    Settle,
    SocketClosed,
    SocketOpened,
    Start,
    StreamEnded,
    StreamOpened,
    Tick,
)
from gapless.protocol.refusal import Reason, Refusal
from tests.client.machine import LINK0, Hand, event_data


def streaming(policy: str = "never", steps: Literal[1, 2] = 1) -> Hand:
    hand = Hand(Client(policy, steps=steps))  # type: ignore[arg-type]
    hand.open()
    return hand


def knocking(events: int = 1) -> Hand:
    """A machine whose handshake is under way, at cursor `events`."""
    hand = streaming("auto")
    hand.client._door_wake = 1e9  # it would knock at the first
    for n in range(events):
        hand.arrive(hand.emit(event_data(n)))
    while hand.take() is not None:
        pass
    hand.put(Move())
    assert hand.client.phase is Phase.KNOCKING
    hand.client._door_wake = 0.0
    return hand


@pytest.mark.rule("C7")
def test_a_hole_drops_the_connection_and_resumes_from_the_last_good_cursor() -> None:
    hand = streaming()
    hand.arrive(hand.emit(event_data(1)))
    hand.take()
    hand.emit(event_data(2))
    effects = hand.arrive(hand.emit(event_data(3)))
    assert any(isinstance(e, CloseStream) for e in effects)
    hand.tick()
    assert hand.last(Get).cursor == hand.id(1)


@pytest.mark.rule("C7")
def test_an_event_whose_link_does_not_follow_is_not_delivered() -> None:
    hand = streaming()
    forged = EventId(1, 0, Link(b"\0" * 8))
    hand.arrive(Block("message", str(forged), event_data(1)))
    assert hand.take() is None
    assert hand.client.phase is Phase.RESTING


@pytest.mark.rule("C7")
def test_an_event_changed_on_the_way_is_not_delivered() -> None:
    hand = streaming()
    block = hand.emit(event_data(1))
    hand.arrive(Block(block.event, block.id, event_data(2)))
    assert hand.take() is None


@pytest.mark.rule("C7")
def test_of_events_that_arrive_together_those_before_a_wrong_one_are_taken() -> None:
    hand = streaming()
    first, second, third = (hand.emit(event_data(n)) for n in (1, 2, 3))
    hand.arrive(first, Block(second.event, second.id, event_data(9)), third)
    assert hand.client.phase is Phase.RESTING
    assert hand.client.committed == 1
    assert (hand.take(), hand.take()) == (event_data(1), None)
    assert hand.client.cursor == hand.id(1)


@pytest.mark.rule("C7")
def test_two_discontinuities_without_progress_are_raised() -> None:
    hand = streaming()
    for _ in range(2):
        hand.arrive(Block("message", str(EventId(5, 0, LINK0)), event_data(5)))
        if hand.client.phase is Phase.RESTING:
            hand.tick()
            hand.listen()
    assert isinstance(hand.client.error, CursorDiscontinuityError)


@pytest.mark.rule("C6")
def test_a_stream_that_starts_elsewhere_than_asked_is_dropped() -> None:
    hand = Hand(Client("never"))
    hand.open()
    hand.arrive(hand.emit(event_data(1)))
    hand.take()
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    hand.put(StreamOpened(hand.client.attempt))
    hand.arrive(Block(id=str(hand.id(0)), data=b""))
    assert hand.client.phase is Phase.RESTING


@pytest.mark.rule("C4")
def test_the_cursor_moves_only_when_the_application_has_accepted_the_event() -> None:
    hand = streaming()
    hand.arrive(hand.emit(event_data(1)))
    assert hand.client.take() is not None
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    assert hand.last(Get).cursor == hand.id(0)


def test_an_event_in_the_applications_hands_is_not_delivered_again_after_a_reconnect() -> None:
    hand = streaming()
    blocks = [hand.emit(event_data(n)) for n in range(3)]
    hand.arrive(blocks[0])
    in_hand = hand.client.take()
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    hand.listen()
    for block in blocks:
        hand.arrive(block)
    assert in_hand is not None
    hand.seen.append(in_hand.data)
    hand.put(Delivered())
    while hand.take() is not None:
        pass
    assert hand.seen == [event_data(n) for n in range(3)]


@pytest.mark.rule("U2")
def test_a_socket_without_an_echo_is_dropped_and_sse_resumed() -> None:
    hand = knocking()
    hand.put(SocketOpened(hand.client.attempt, None))
    hand.arrive(hand.emit(event_data(2)))
    assert any(isinstance(e, CloseSocket) for e in hand.effects)
    hand.tick()
    assert hand.last(Get).cursor == hand.id(1)


@pytest.mark.rule("U2")
def test_an_echo_behind_the_clients_cursor_is_a_discontinuity() -> None:
    hand = knocking(3)
    hand.put(SocketOpened(hand.client.attempt, 2))
    assert hand.client.phase is Phase.RESTING


@pytest.mark.rule("U2")
def test_the_echo_of_another_handshake_is_a_discontinuity() -> None:
    hand = knocking(3)
    hand.put(SocketOpened(hand.client.attempt, None))
    hand.arrive(hand.echo(5, cursor=1))
    assert hand.client.phase is Phase.RESTING


@pytest.mark.rule("U2")
def test_the_header_may_be_dropped_on_the_way() -> None:
    hand = knocking()
    hand.put(SocketOpened(hand.client.attempt, None))
    hand.arrive(hand.echo(1))
    assert hand.client.phase is Phase.BOUND


@pytest.mark.rule("U3")
def test_a_first_frame_that_skips_the_gap_is_a_migration_gap() -> None:
    hand = knocking()
    hand.emit(event_data(2))
    hand.bind(3)
    hand.arrive(hand.emit(event_data(3)))
    assert hand.client.phase is Phase.RESTING
    hand.tick()
    hand.listen()
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    assert hand.last(Get).cursor == hand.id(1)


@pytest.mark.rule("U3")
def test_a_repeated_migration_gap_is_raised_as_such() -> None:
    hand = knocking()
    hand.emit(event_data(2))
    skipped = hand.emit(event_data(3))
    hand.bind(3)
    hand.client._faults = 1  # it has happened once already, without progress since
    hand.arrive(skipped)
    assert isinstance(hand.client.error, SessionMigrationGapError)


@pytest.mark.rule("U3", "U4")
def test_the_ack_is_sent_once_the_gap_is_processed_and_not_before() -> None:
    hand = knocking()
    hand.bind(3)
    for n in (2, 3):
        hand.arrive(hand.emit(event_data(n)))
    assert not any(isinstance(e, Send) and b"cursor-ack" in e.frame for e in hand.effects)
    hand.take()
    assert hand.client.phase is Phase.BRIDGING
    hand.take()
    assert hand.client.phase is Phase.BOUND
    assert str(hand.id(3)).encode() in hand.last(Send).frame


@pytest.mark.rule("U3")
def test_an_empty_gap_is_acknowledged_at_once() -> None:
    hand = knocking()
    assert any(isinstance(e, Send) and b"cursor-ack" in e.frame for e in hand.bind(1))


@pytest.mark.rule("U4")
def test_an_event_above_the_gap_before_the_ack_is_a_discontinuity() -> None:
    hand = knocking()
    hand.bind(2)
    for n in (2, 3):
        hand.arrive(hand.emit(event_data(n)))
    assert hand.client.phase is Phase.RESTING


@pytest.mark.rule("U5")
def test_bound_it_acks_every_64_events_or_each_second() -> None:
    hand = knocking()
    hand.bind(1)
    hand.effects.clear()
    for n in range(64):
        hand.arrive(hand.emit(event_data(n)))
        hand.take()
    assert sum(isinstance(e, Send) for e in hand.effects) == 1
    hand.arrive(hand.emit(event_data(99)))
    hand.take()
    assert hand.client.deadline == hand.now + 1.0
    hand.tick()
    assert sum(isinstance(e, Send) for e in hand.effects) == 2


@pytest.mark.rule("U10")
def test_from_handshake_to_answer_no_event_stream_is_read() -> None:
    hand = knocking()
    assert not hand.client.reading
    refusal = Refusal(Reason.TICKET_SPENT, "")
    hand.put(Refused(hand.client.attempt, 409, refusal))
    assert hand.client.reading


@pytest.mark.rule("U10")
def test_on_101_the_event_stream_is_closed() -> None:
    hand = knocking()
    stream = hand.client.stream
    effects = hand.put(SocketOpened(hand.client.attempt, 1))
    assert effects[0] == CloseStream(stream or 0)


@pytest.mark.rule("B7")
def test_the_door_is_tried_again_only_after_an_event_and_with_backoff() -> None:
    hand = knocking()
    hand.bind(1)
    hand.put(SocketClosed(hand.client.socket or 0, 1006))
    hand.tick()
    hand.listen()
    hand.now += 100
    assert hand.client.phase is Phase.STREAMING, "no event yet"
    hand.arrive(hand.emit(event_data(2)))
    hand.take()
    assert hand.client.phase is Phase.KNOCKING


@pytest.mark.rule("B6")
def test_a_probe_is_answered_ahead_of_processing() -> None:
    hand = knocking()
    hand.bind(3)
    hand.arrive(hand.emit(event_data(2)))
    effects = hand.arrive(Block("probe", data=b'{"nonce":"n"}'))
    assert effects == [Send(hand.client.socket or 0, b'event: probe-ack\ndata: {"nonce":"n"}\n\n')]


@pytest.mark.rule("C8")
def test_an_application_that_takes_nothing_is_no_silence_of_the_server() -> None:
    hand = Hand(Client("never", ahead=2, retry=Retry()))
    hand.open()
    for n in (1, 2):
        hand.arrive(hand.emit(event_data(n)))
    assert hand.client.full
    assert hand.client.deadline is None, "nothing is read, so nothing is waited for"
    hand.now += 1000
    hand.put(Tick())
    assert hand.client.phase is Phase.STREAMING
    hand.take()
    hand.now += 2 * 15 - 1
    hand.put(Tick())
    assert hand.client.phase is Phase.STREAMING
    hand.now += 1
    hand.put(Tick())
    assert hand.client.phase is not Phase.STREAMING, "from when it reads again, silence counts"


@pytest.mark.rule("C8")
def test_nor_is_one_that_takes_nothing_while_a_connection_opens() -> None:
    hand = Hand(Client("never", ahead=2))
    hand.open()
    hand.arrive(hand.emit(event_data(1)), hand.emit(event_data(2)))
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    hand.listen()
    hand.now += 100
    hand.take()
    hand.put(Tick())
    assert hand.client.phase is Phase.STREAMING


@pytest.mark.rule("C8")
def test_silence_for_twice_the_keep_alive_drops_the_connection() -> None:
    hand = streaming()
    assert hand.client.deadline == hand.now + 30
    hand.tick()
    assert hand.client.phase is Phase.RESTING
    assert any(isinstance(e, CloseStream) for e in hand.effects)


@pytest.mark.rule("L6")
def test_what_was_not_received_is_resent_from_there_when_a_connection_opens() -> None:
    hand = streaming()
    hand.submit({"id": 1, "method": "a"})
    hand.put(Received(hand.last(Post).attempt, 1))
    hand.submit({"id": 2, "method": "b"})
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    hand.listen()
    (kept,) = hand.last(Post).messages
    assert kept.number == 2


@pytest.mark.rule("L6", "C8")
@pytest.mark.parametrize("silent", [False, True])
def test_what_went_down_with_a_socket_goes_ahead_of_what_is_said_next(silent: bool) -> None:
    hand = knocking()
    hand.bind(1)
    hand.submit({"id": 1, "method": "a"})
    if silent:
        while hand.client.phase is Phase.BOUND:
            hand.tick()
    else:
        hand.put(SocketClosed(hand.client.socket or 0, 1006))
    hand.submit({"id": 2, "method": "b"})
    assert [kept.number for kept in hand.last(Post).messages] == [1, 2], "or it would leave a hole"


@pytest.mark.rule("L6", "N3")
def test_a_newcomer_numbers_from_what_it_is_told() -> None:
    hand = Hand(Client("never", session="token", cursor=EventId(0, 0, LINK0)))
    hand.put(Start())
    hand.submit({"id": 1, "method": "a"})
    assert not any(isinstance(e, Post) for e in hand.effects), "it has not been told yet"
    hand.put(StreamOpened(hand.client.attempt))
    hand.arrive(Block(id=str(hand.id(0)), data=b""))
    hand.arrive(Block("received", data=b'{"received":41}'))
    (kept,) = hand.last(Post).messages
    assert kept.number == 42


@pytest.mark.rule("L6")
def test_on_a_socket_a_resend_is_answered_from_received_plus_one() -> None:
    hand = knocking()
    hand.bind(1)
    for n in (1, 2):
        hand.submit({"id": n, "method": "a"})
    effects = hand.arrive(Block("received", data=msgspec.json.encode({"received": 1, "resend": True})))
    assert [e.frame.split(b"\n")[0] for e in effects if isinstance(e, Send)] == [b"id: 2"]


@pytest.mark.rule("L6")
def test_a_refused_block_fails_its_request_once() -> None:
    hand = knocking()
    hand.bind(1)
    hand.submit({"id": 7, "method": "a"})
    error = Refusal(Reason.MALFORMED, "no").error()
    body = msgspec.json.encode({"n": 1, "reason": "malformed", "error": error})
    (settle,) = hand.arrive(Block("refused", data=body))
    assert settle.id == 7  # type: ignore[union-attr]
    assert hand.arrive(Block("refused", data=body)) == []


@pytest.mark.rule("B1", "L7")
def test_a_superseded_session_ends_the_client() -> None:
    hand = streaming()
    hand.submit({"id": 1, "method": "a"})
    body = b'{"reason":"non-resumable-boundary","retryable":false,"action":"open-new-session"}'
    hand.arrive(hand.emit(body, "session-superseded"))
    hand.take()
    assert hand.client.error is not None
    assert hand.client.error.code == "non-resumable-boundary"


@pytest.mark.rule("B1", "L7")
def test_a_stream_that_ends_with_the_session_is_not_asked_for_again() -> None:
    hand = streaming()
    hand.submit({"id": 1, "method": "a"})
    hand.submit({"id": 2, "method": "a"})
    hand.arrive(hand.emit(b'{"jsonrpc":"2.0","id":2,"result":{}}'))
    hand.arrive(hand.emit(b'{"reason":"session-expired","retryable":false}', "session-superseded"))
    effects = hand.put(StreamEnded(hand.client.stream or 0))
    assert [e.id for e in effects if isinstance(e, Settle)] == [1], "the answer to the other is here"
    assert hand.client.error is not None
    assert hand.client.error.code == "session-expired"
    assert not any(isinstance(e, Delete) for e in effects)
    while hand.take() is not None:
        pass
    assert hand.seen == [b'{"jsonrpc":"2.0","id":2,"result":{}}']


@pytest.mark.rule("U9")
def test_a_stream_that_ends_at_an_acceptance_leads_to_the_door_with_its_ticket() -> None:
    hand = streaming("auto")
    hand.client._door_wake = 1e9  # it would not knock by itself
    body = msgspec.json.encode({"negotiation": "other", "ticket": "t", "url": "/x"})
    hand.arrive(hand.emit(body, "upgrade-accepted"))
    effects = hand.put(StreamEnded(hand.client.stream or 0))
    assert [e.ticket for e in effects] == ["t"]  # type: ignore[union-attr]


@pytest.mark.rule("U7", "B1")
@pytest.mark.parametrize("steps", [1, 2])
def test_a_client_that_moves_after_somebodys_acceptance_has_its_ticket(steps: Literal[1, 2]) -> None:
    hand = streaming("auto", steps=steps)
    hand.client._door_wake = 1e9  # it would not knock by itself
    body = msgspec.json.encode({"negotiation": "other", "ticket": "t", "url": "/x"})
    hand.arrive(hand.emit(body, "upgrade-accepted"))
    hand.take()
    assert [e.ticket for e in hand.put(Move())] == ["t"]  # type: ignore[union-attr]


@pytest.mark.rule("U7", "B1")
def test_so_has_one_that_was_told_to_try_again_later() -> None:
    hand = streaming("require")
    hand.put(Move())
    refusal = Refusal(Reason.LIMIT, "too many upgrades")
    hand.put(Refused(hand.client.attempt, refusal.row.status, refusal, 1.0))
    body = msgspec.json.encode({"negotiation": "other", "ticket": "t", "url": "/x"})
    hand.arrive(hand.emit(body, "upgrade-accepted"))
    assert [e.ticket for e in hand.tick()] == ["t"]  # type: ignore[union-attr]


@pytest.mark.rule("B7")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("reason", [Reason.LIMIT, Reason.STORAGE])
def test_a_door_that_is_closed_for_now_costs_no_stream_that_lives(
    steps: Literal[1, 2], reason: Reason
) -> None:
    hand = streaming("auto", steps=steps)
    hand.arrive(hand.emit(event_data(1)))
    hand.take()
    assert hand.client.phase is (Phase.KNOCKING if steps == 1 else Phase.NEGOTIATING)
    refusal = Refusal(reason, "for now")
    assert hand.put(Refused(hand.client.attempt, refusal.row.status, refusal, 9.0)) == []
    hand.arrive(hand.emit(event_data(2)))
    hand.now += 8
    hand.take()
    assert hand.client.phase is Phase.STREAMING, "not before the time that it was told"
    for _ in range(30):
        hand.put(Move())
        hand.put(Refused(hand.client.attempt, refusal.row.status, refusal, 9.0))
    assert hand.client.transport == "sse"


@pytest.mark.rule("L6")
def test_a_post_that_is_answered_late_makes_no_socket_send_twice() -> None:
    hand = knocking()
    hand.submit({"id": 1, "method": "a"})
    hand.bind(1)
    hand.submit({"id": 2, "method": "b"})
    hand.put(Received(hand.last(Post).attempt, 1))
    assert sum(isinstance(e, Send) and b"id: 2\n" in e.frame for e in hand.effects) == 1


@pytest.mark.rule("U9")
def test_an_acceptance_in_the_middle_of_a_stream_is_history() -> None:
    hand = streaming("auto")
    hand.client._door_wake = 1e9
    body = msgspec.json.encode({"negotiation": "other", "ticket": "t", "url": "/x"})
    hand.arrive(hand.emit(body, "upgrade-accepted"))
    hand.arrive(hand.emit(event_data(2)))
    hand.put(StreamEnded(hand.client.stream or 0))
    hand.tick()
    assert hand.client.phase is Phase.LISTENING


@pytest.mark.rule("B5", "U10")
def test_the_retry_that_holds_back_an_event_source_does_not_hold_back_a_handshake() -> None:
    hand = streaming("never", steps=2)
    hand.put(Move())
    hand.arrive(Block(retry=30_000))  # the stream is about to end at `U`, and is cut before it has
    hand.put(Offered(hand.client.attempt, "ticket"))
    hand.put(Failed(hand.client.attempt, "reset"))
    hand.tick()
    assert hand.client.phase is Phase.KNOCKING
    assert hand.now < 1.0


@pytest.mark.rule("B7")
@pytest.mark.parametrize("how", ["silence", "discontinuity"])
def test_after_a_socket_that_was_given_up_the_door_is_left_alone_for_a_while(how: str) -> None:
    hand = streaming("auto")
    hand.arrive(hand.emit(event_data(1)))
    hand.take()
    hand.bind(1)
    late = hand.emit(event_data(2))
    if how == "silence":
        hand.now += 31.0
        hand.put(Tick())
    else:
        hand.arrive(hand.emit(event_data(3)))
    hand.tick()
    hand.listen()
    hand.arrive(late)
    hand.take()
    assert hand.client.phase is Phase.STREAMING


@pytest.mark.rule("L6", "S5")
@pytest.mark.parametrize("opening", [True, False])
def test_a_number_received_from_another_process_is_not_taken_for_our_own(opening: bool) -> None:
    hand = Hand(Client("never", process="ours"))
    hand.open()
    hand.submit({"id": 7, "method": "a"})
    if opening:
        hand.put(StreamEnded(hand.client.stream or 0))  # the answer to our POST is lost with everything else
        hand.tick()
        hand.put(StreamOpened(hand.client.attempt))
        hand.arrive(Block(id=str(hand.client.incoming.stated), data=b""))
    hand.arrive(Block("received", data=b'{"received":1,"process":"theirs"}'))
    assert hand.client.error is not None
    assert hand.client.error.code == "message-conflict"
    assert hand.last(Settle).id == 7
    assert not any(isinstance(effect, Delete) for effect in hand.effects)


@pytest.mark.rule("L6")
def test_what_others_have_sent_is_nothing_to_who_has_sent_nothing() -> None:
    hand = Hand(Client("never", process="ours"))
    hand.open()
    hand.arrive(Block("received", data=b'{"received":3,"process":"theirs"}'))
    assert hand.client.error is None


@pytest.mark.rule("B6")
def test_a_session_that_somebody_else_holds_is_not_deleted_by_who_gives_up_on_it() -> None:
    hand = Hand(Client("never", retry=Retry(attempts=2)))
    hand.put(Start())
    hand.put(Opened(hand.client.attempt, "token", hand.id(0), {}, {}))
    bound = Refusal(Reason.WEBSOCKET_BOUND, "bound", committed=0)
    while hand.client.error is None:
        hand.put(Refused(hand.client.attempt, 409, bound, retry_after=None))
        if hand.client.error is None:
            hand.tick()
    assert hand.client.error.code == "websocket-bound"
    assert not any(isinstance(effect, Delete) for effect in hand.effects)
