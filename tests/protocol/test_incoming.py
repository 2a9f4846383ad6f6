"""C6, C7, U2–U4 at the client: what may arrive after what."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import CursorDiscontinuityError, MalformedError, SessionMigrationGapError
from gapless.protocol.block import Block
from gapless.protocol.cursor import EventId, Link, link_after
from gapless.protocol.incoming import Incoming

START = EventId(0, 0, Link(bytes(8)))


def chain(count: int, start: EventId = START, kind: str = "message") -> list[Block]:
    """Events that follow `start`."""
    blocks: list[Block] = []
    at = start
    for seq in range(start.seq + 1, start.seq + 1 + count):
        data = b'{"n":%d}' % seq
        stream = seq // 2 % 2  # two in a row of each
        at = EventId(seq, stream, link_after(at.link, stream, kind, data))
        blocks.append(Block(kind, str(at), data))
    return blocks


def stream(cursor: EventId = START) -> Incoming:
    """A stream that is primed at its cursor."""
    incoming = Incoming(cursor, ahead=100)
    incoming.state()
    incoming.attach()
    incoming.prime(Block(id=str(cursor), data=b"", retry=100))
    return incoming


def echo(cursor: object, start: object = START) -> Block:
    """A `resume-cursor` block."""
    return Block("resume-cursor", None, msgspec.json.encode({"cursor": cursor, "from": str(start)}))


def socket(upto: object, cursor: EventId = START) -> Incoming:
    """A socket that has told its echo."""
    incoming = Incoming(cursor, ahead=100)
    incoming.state()
    incoming.attach()
    incoming.bridge(echo(upto, cursor))
    return incoming


@pytest.mark.rule("C7")
def test_events_that_follow_the_cursor_and_each_other_are_taken_in_order() -> None:
    incoming = stream()
    for block in chain(5):
        incoming.events((block,), False)
    taken: list[int] = []
    while (event := incoming.take()) is not None:
        taken.append(event.id.seq)
        incoming.delivered()
    assert taken == [1, 2, 3, 4, 5]
    assert incoming.cursor is not None
    assert incoming.cursor.seq == 5


@pytest.mark.rule("C7")
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_nothing_but_the_next_event_is_ever_taken(order: list[int]) -> None:
    incoming, blocks = stream(), chain(6)
    expected = 0
    for at in order:
        if at == expected:
            incoming.events((blocks[at],), False)
            expected += 1
            continue
        with pytest.raises(CursorDiscontinuityError):
            incoming.events((blocks[at],), False)
        assert incoming.anchor is not None
        assert incoming.anchor.seq == expected, "what is refused changes nothing"


@pytest.mark.parametrize("what", ["data", "type", "link", "stream"])
@pytest.mark.rule("C7", "L5")
def test_an_event_that_is_not_what_its_link_says_is_refused(what: str) -> None:
    (block,) = chain(1)
    assert block.id is not None
    other = {
        "data": Block(block.event, block.id, b'{"n":2}'),
        "type": Block("upgrade-accepted", block.id, block.data),
        "link": Block(block.event, "1.0.0123456789abcdef", block.data),
        "stream": Block(block.event, block.id.replace(".0.", ".1."), block.data),
    }[what]
    with pytest.raises(CursorDiscontinuityError):
        stream().events((other,), False)


@pytest.mark.rule("C7", "L5")
def test_an_event_of_another_log_is_refused_whatever_its_number() -> None:
    other = chain(1, EventId(0, 0, Link(b"\1" * 8)))[0]
    with pytest.raises(CursorDiscontinuityError):
        stream().events((other,), False)


@pytest.mark.rule("C7")
def test_an_event_that_comes_again_and_is_another_is_refused() -> None:
    incoming, other = stream(), EventId(1, 0, link_after(START.link, 0, "message", b"other"))
    incoming.events(chain(1), False)
    incoming.state()
    incoming.attach()
    incoming.prime(Block(id=str(START), data=b"", retry=100))
    with pytest.raises(CursorDiscontinuityError, match="another"):
        incoming.events((Block("message", str(other), b"other"),), False)


@pytest.mark.rule("C6")
@pytest.mark.parametrize(
    "block",
    [Block(), Block(data=b""), Block(id="1.0.0123456789abcdef", data=b""), Block(id=str(START), data=b"x")],
)
def test_a_stream_that_does_not_open_with_our_own_cursor_is_refused(block: Block) -> None:
    incoming = Incoming(START, ahead=100)
    incoming.attach()
    with pytest.raises(CursorDiscontinuityError):
        incoming.prime(block)
    assert not incoming.primed


@pytest.mark.rule("C4", "C7")
def test_the_cursor_moves_only_when_the_application_has_the_event() -> None:
    incoming = stream()
    for block in chain(2):
        incoming.events((block,), False)
    assert incoming.state() == START
    assert incoming.take() is not None
    assert incoming.state() == START
    incoming.delivered()
    assert incoming.state().seq == 1
    assert incoming.cursor == incoming.state()


@pytest.mark.rule("C7")
def test_what_was_read_ahead_comes_again_after_a_resume_and_is_not_delivered_twice() -> None:
    incoming, blocks = stream(), chain(3)
    for block in blocks:
        incoming.events((block,), False)
    event = incoming.take()
    assert event is not None, "in the application's hands while the connection breaks"
    incoming.state()
    incoming.attach()
    incoming.prime(Block(id=str(START), data=b"", retry=100))
    incoming.delivered()
    seen = [event.id.seq]
    for block in blocks:
        incoming.events((block,), False)
        while (again := incoming.take()) is not None:
            seen.append(again.id.seq)
            incoming.delivered()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("found", [None, "5", 5.0, True, -1])
@pytest.mark.rule("U2")
def test_an_echo_that_is_no_position_at_or_above_ours_is_refused(found: object) -> None:
    with pytest.raises(CursorDiscontinuityError):
        socket(found)


@pytest.mark.rule("U2")
def test_an_echo_of_somebody_elses_handshake_is_refused() -> None:
    incoming = Incoming(START, ahead=100)
    incoming.attach()
    with pytest.raises(CursorDiscontinuityError):
        incoming.bridge(echo(3, "1.0.0123456789abcdef"))


@pytest.mark.rule("U2")
def test_header_and_first_frame_may_not_differ() -> None:
    incoming = Incoming(START, ahead=100)
    incoming.attach()
    incoming.check_echo(3)
    with pytest.raises(CursorDiscontinuityError):
        incoming.bridge(echo(4))


@pytest.mark.rule("U2")
def test_a_socket_whose_first_block_is_something_else_is_refused() -> None:
    incoming = Incoming(START, ahead=100)
    incoming.attach()
    with pytest.raises(CursorDiscontinuityError):
        incoming.bridge(Block("received", None, b"{}"))
    with pytest.raises(MalformedError):
        incoming.bridge(Block("resume-cursor", None, b"[]"))


@pytest.mark.rule("U3")
def test_a_gap_that_does_not_start_after_our_cursor_is_a_migration_gap() -> None:
    with pytest.raises(SessionMigrationGapError):
        socket(3).events((chain(2)[1],), True)


@pytest.mark.rule("U3", "C7")
def test_a_hole_inside_the_gap_is_a_discontinuity() -> None:
    incoming, blocks = socket(3), chain(3)
    incoming.events((blocks[0],), True)
    with pytest.raises(CursorDiscontinuityError):
        incoming.events((blocks[2],), True)


@pytest.mark.rule("U4")
def test_an_event_above_the_gap_before_its_ack_is_refused() -> None:
    incoming, blocks = socket(2), chain(3)
    incoming.events((blocks[0],), True)
    incoming.events((blocks[1],), True)
    with pytest.raises(CursorDiscontinuityError):
        incoming.events((blocks[2],), True)
    incoming.gap = None
    incoming.events((blocks[2],), False)
