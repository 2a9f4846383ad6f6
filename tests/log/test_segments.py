"""Segments and tails against the plainest model there is: a list of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.log.base import BelowFloorError, SessionKey, Write
from gapless.log.segments import Ahead, DamagedError, Segment, Segments, Tails, join
from gapless.protocol.block import encode_event
from gapless.protocol.cursor import LINK_BYTES, EventId, Link

A, B, C = (SessionKey(name * 32) for name in (b"a", b"b", b"c"))


def link(seq: int) -> Link:
    return Link(sha256(b"%d" % seq).digest()[:8])


def block(seq: int, data: bytes = b"{}", event: str = "message", stream: int = 0) -> bytes:
    return encode_event(EventId(seq, stream, link(seq)), event, data)


def blocks(first: int, last: int, data: bytes = b"{}") -> bytes:
    return b"".join(block(seq, data) for seq in range(first, last + 1))


# What could be mistaken for a boundary: IDs in the data, escaped line ends, no data at all.
DATA = st.sampled_from(
    [b"", b"{}", b"id: 3.", b"\\n\\nid: 2.0.", b'{"x":"data: "}', b"x" * 30, b"\r", "\u2028".encode()]
)
RUNS = st.lists(
    st.lists(
        st.tuples(DATA, st.sampled_from(["message", "upgrade-accepted"]), st.integers(0, 12)), min_size=1
    ),
    max_size=6,
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Segments, list[bytes], int]:
    """A run of segments, the same as a list of blocks, and the number before its first event."""
    start = draw(st.sampled_from([0, 8, 97, 2**40]))
    run, model = Segments(start), list[bytes]()
    for events in draw(RUNS):
        segment = [
            block(start + len(model) + at, data, event, stream)
            for at, (data, event, stream) in enumerate(events, 1)
        ]
        model += segment
        run.append(start + len(model), b"".join(segment))
    return run, model, start


@given(runs(), st.data())
def test_a_read_is_what_a_list_of_blocks_would_give(
    case: tuple[Segments, list[bytes], int], data: st.DataObject
) -> None:
    run, model, start = case
    after = data.draw(st.integers(start, start + len(model)))
    upto = data.draw(st.integers(start, start + len(model) + 2))
    limit = data.draw(st.integers(-2, len(b"".join(model)) + 2))
    expected, last = b"", after
    for one in model[after - start : max(upto - start, 0)]:
        if expected and len(expected) + len(one) > limit:
            break
        expected, last = expected + one, last + 1
    assert run.read(after, upto, limit) == (expected, last)


@given(runs())
def test_each_held_event_has_its_link(case: tuple[Segments, list[bytes], int]) -> None:
    run, model, start = case
    numbers = range(start + 1, start + len(model) + 1)
    assert [run.link(seq) for seq in numbers] == [link(seq) for seq in numbers]
    assert run.link(start) is None
    assert run.link(start + len(model) + 1) is None


@given(runs(), st.lists(st.integers(0, 40), max_size=4))
def test_an_eviction_hides_what_is_at_or_below_the_floor_and_nothing_else(
    case: tuple[Segments, list[bytes], int], floors: list[int]
) -> None:
    run, model, start = case
    last = start + len(model)
    floor = 0
    for one in floors:
        floor = max(floor, min(start + one, last))
        run.evict_to(min(start + one, last))
        assert run.floor == floor
        assert run.last == last
        above = max(floor, start)
        assert run.read(above, last, 2**20) == (b"".join(model[above - start :]), last)
        assert [run.link(seq) is not None for seq in range(start + 1, last + 1)] == [
            seq > floor for seq in range(start + 1, last + 1)
        ]
        if floor > 0:
            with pytest.raises(BelowFloorError):
                run.read(floor - 1, last, 2**20)


@given(runs(), st.data())
def test_whatever_is_damaged_is_told_as_damage_or_not_at_all(
    case: tuple[Segments, list[bytes], int], data: st.DataObject
) -> None:
    _, model, start = case
    if not model:
        return
    good = b"".join(model)
    at = data.draw(st.integers(0, len(good)))
    cut = data.draw(st.integers(0, len(good) - at))
    junk = data.draw(
        st.sampled_from([b"", b"\0", b"\n\n", b"id: ", b"\n\nid: 3.0.", b"9", b" ", b"\xff" * 9])
    )
    run, last = Segments(start), start + len(model)
    run.append(last, good[:at] + junk + good[at + cut :])
    (segment,) = run
    after = data.draw(st.integers(start, last - 1))
    limit = data.draw(st.integers(0, len(good)))
    with suppress(DamagedError):
        read, reached = run.read(after, last, limit)
        assert read.endswith(b"\n\n")
        assert after < reached <= last
    with suppress(DamagedError):
        assert len(run.link(after + 1) or b"") == LINK_BYTES
    with suppress(DamagedError):
        assert len(list(segment.ids(start))) == len(model)


DAMAGE = {
    "nothing like events": b"\xa5" * 200,
    "zeros": bytes(200),
    "nothing": b"",
    "other events": blocks(4, 6),
    "an event less": blocks(1, 2),
    "an event more": blocks(1, 4),
    "a hole": block(1) + block(3),
    "an event cut short": blocks(1, 3)[:-5],
    "no blank line at the end": blocks(1, 3)[:-1],
    "no number": block(1) + block(2).replace(b"id: 2.", b"id: x.") + block(3),
    "no link": block(1) + block(2).replace(link(2).hex().encode(), b"2" * 15) + block(3),
    "a link that is none": block(1) + block(2).replace(link(2).hex().encode(), b"2 " * 8) + block(3),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_by_all_that_looks_at_the_whole(damage: str) -> None:
    segment = Segment(1, 3, DAMAGE[damage])
    with pytest.raises(DamagedError, match=r"the log is damaged: .*event"):
        assert [*segment.ids(0), segment.start(4)]


@pytest.mark.parametrize(
    ("data", "after", "upto", "limit"),
    [
        (blocks(4, 6), 0, 3, 2**20),  # another segment's
        (blocks(4, 6), 0, 3, 1),
        (block(1) + block(3) + block(2), 1, 2, 2**20),  # what should follow comes before
        (block(1) + block(9) + block(3), 0, 3, 1),  # cut before a number that cannot follow
        (block(1) + block(1) + block(3), 0, 3, 1),
        (block(1) + b"data: {}\n\n" + block(3), 0, 3, 1),
    ],
)
def test_a_read_that_meets_damage_where_it_begins_ends_or_is_cut_says_so(
    data: bytes, after: int, upto: int, limit: int
) -> None:
    run = Segments()
    run.append(3, data)
    with pytest.raises(DamagedError):
        run.read(after, upto, limit)


def test_a_whole_segment_is_returned_without_a_copy() -> None:
    one, two = blocks(1, 3), blocks(4, 5)
    run = Segments()
    run.append(3, one)
    run.append(5, two)
    assert run.read(0, 3, 2**20)[0] is one
    assert run.read(0, 9, len(one))[0] is one
    assert run.read(0, 9, len(one) + 1)[0] is one
    assert run.read(3, 9, 2**20)[0] is two


def test_no_more_segments_are_taken_than_are_needed() -> None:
    taken: list[int] = []

    def segments() -> Iterator[Segment]:
        for first in range(1, 100, 2):
            taken.append(first)
            yield Segment(first, first + 1, blocks(first, first + 1))

    assert join(segments(), 0, 99, len(blocks(1, 4))) == (blocks(1, 4), 4)
    assert taken == [1, 3]


def test_a_segment_that_reaches_above_the_floor_is_kept_until_all_of_it_is_below() -> None:
    run = Segments()
    run.append(4, blocks(1, 4))
    full = run.size
    run.evict_to(3)
    assert run.size == full
    run.evict_to(4)
    assert (run.size, run.first) == (0, 5)


def test_shrinking_lets_go_of_the_oldest_and_moves_no_floor() -> None:
    run = Segments()
    for seq in range(1, 6):
        run.append(seq, block(seq))
    each = run.size // 5
    run.shrink(3 * each - 1)
    assert (run.first, run.last, run.floor, run.size) == (4, 5, 0, 2 * each)
    assert run.read(2, 5, 2**20) == (b"", 2)
    assert run.read(3, 5, 2**20) == (blocks(4, 5), 5)
    run.shrink(0)
    assert run.read(3, 5, 2**20) == (b"", 3)
    assert run.link(5) is None
    run.append(6, block(6))
    assert run.read(5, 6, 2**20) == (block(6), 6)


def test_a_copy_shares_bytes_and_nothing_else() -> None:
    run, data = Segments(), blocks(1, 2)
    run.append(2, data)
    run.append(3, block(3))
    run.evict_to(1)
    copy = run.copy()
    copy.append(4, block(4))
    copy.evict_to(2)
    assert (run.first, run.last, run.floor) == (1, 3, 1)
    assert (copy.first, copy.last, copy.floor) == (3, 4, 2)
    assert run.copy().read(1, 2, 2**20) == (block(2), 2)
    assert run.copy().size == run.size


# --- Tails ----------------------------------------------------------------------------------


def write(first: int, last: int, data: bytes = b"{}", floor: int | None = None) -> Write:
    floor_link = None if floor is None else link(floor)
    return Write(first - 1, blocks(first, last, data), last, link(last), floor=floor, floor_link=floor_link)


def test_a_tail_holds_what_was_written_and_says_nothing_of_what_was_not() -> None:
    tails = Tails(2**20)
    tails.wrote(A, write(8, 9))
    tails.wrote(A, write(10, 10))
    assert tails.read(A, 8, 99, 2**20) == (blocks(9, 10), 10)
    assert tails.read(A, 6, 99, 2**20) == (b"", 6)
    assert tails.read(B, 8, 99, 2**20) == (b"", 8)
    assert tails.link(A, 9) == link(9)
    assert tails.link(A, 7) is None
    assert tails.link(B, 9) is None


def test_a_tail_begins_anew_after_a_write_it_was_not_told_of() -> None:
    tails = Tails(2**20)
    tails.wrote(A, write(1, 2))
    tails.wrote(A, write(5, 6))
    assert tails.read(A, 1, 99, 2**20) == (b"", 1)
    assert tails.read(A, 4, 99, 2**20) == (blocks(5, 6), 6)
    tails.forget(B)
    tails.forget(A)
    assert tails.read(A, 4, 99, 2**20) == (b"", 4)
    assert tails.size == 0


def test_a_tail_is_evicted_as_its_session_is() -> None:
    tails = Tails(2**20)
    tails.wrote(A, write(1, 4))
    tails.wrote(A, write(5, 5, floor=3))
    with pytest.raises(BelowFloorError):
        tails.read(A, 2, 99, 2**20)
    assert tails.link(A, 3) is None
    assert tails.read(A, 3, 99, 2**20) == (blocks(4, 5), 5)
    tails.wrote(A, Write(5, b"", 5, link(5), floor=5, floor_link=link(5)))
    assert tails.size == 0


def test_a_full_cache_lets_go_of_the_oldest_events_of_whoever_was_quiet_longest() -> None:
    one = Segments()
    one.append(1, block(1, b"x" * 100))
    tails = Tails(one.size * 8)
    for seq in range(1, 4):
        for session in (A, B):
            tails.wrote(session, write(seq, seq, b"x" * 100))
    tails.read(A, 0, 9, 1)
    tails.wrote(C, write(1, 3, b"x" * 100))
    tails.wrote(C, write(4, 5, b"x" * 100))
    assert tails.size <= one.size * 8
    assert tails.read(A, 0, 9, 2**20)[1] == 3
    assert tails.read(B, 0, 9, 2**20) == (b"", 0)
    assert tails.read(B, 2, 9, 2**20) == (block(3, b"x" * 100), 3)
    assert tails.read(C, 0, 9, 2**20)[1] == 5


@given(
    st.integers(0, 2000),
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 4), st.integers(0, 5), st.booleans())),
)
def test_a_cache_never_outgrows_its_limit_nor_returns_anything_but_the_events_asked_for(
    limit: int, steps: list[tuple[SessionKey, int, int, bool]]
) -> None:
    tails = Tails(limit)
    last = dict.fromkeys((A, B, C), 0)
    for session, events, back, forget in steps:
        if forget and events == 4:
            tails.forget(session)
        first, last[session] = last[session] + 1, last[session] + events
        tails.wrote(session, write(first, last[session]))
        assert 0 <= tails.size <= limit
        after = max(last[session] - back, 0)
        data, reached = tails.read(session, after, last[session], 2**20)
        assert (data, reached) in ((blocks(after + 1, last[session]), last[session]), (b"", after))
    for session in (A, B, C):
        tails.forget(session)
    assert tails.size == 0


# --- Ahead ----------------------------------------------------------------------------------


def ahead_of(*events: tuple[SessionKey, int], limit: int = 2**20) -> Ahead:
    """Holds, for each session, a run of three events for whoever has read up to the second."""
    ahead = Ahead(limit)
    for name, after in events:
        run = Segments(after - 2)
        run.append(after + 1, blocks(after - 1, after + 1))
        ahead.keep(name, after, run)
    return ahead


def test_what_was_read_ahead_is_for_one_reader_who_goes_on_from_there() -> None:
    ahead = ahead_of((A, 7), (A, 9), (B, 7))
    assert ahead.take(A, 8) is None
    assert ahead.take(C, 7) is None
    run = ahead.take(A, 7)
    assert run is not None
    assert run.read(7, 8, 100) == (block(8), 8)
    assert ahead.take(A, 7) is None
    assert ahead.take(A, 9) is not None
    assert ahead.take(B, 7) is not None


def test_nothing_is_held_of_a_session_that_is_forgotten_or_for_those_below_its_floor() -> None:
    ahead = ahead_of((A, 7), (A, 9), (B, 7))
    ahead.evict_to(A, 8)
    ahead.forget(B)
    assert ahead.take(A, 7) is None
    assert ahead.take(B, 7) is None
    assert ahead.take(A, 9) is not None


def test_what_is_read_ahead_is_bounded_and_those_who_read_last_keep_theirs() -> None:
    size = Segments(0)
    size.append(3, blocks(1, 3))
    ahead = ahead_of((A, 7), (B, 7), (A, 9), (C, 7), limit=4 * size.size - 1)
    assert [ahead.take(name, 7) is None for name in (A, B, C)] == [False, True, False]
    assert ahead.take(A, 9) is not None
    assert ahead._size == 0
