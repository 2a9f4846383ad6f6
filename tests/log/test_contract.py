"""What `gapless.log.base` promises, asked of every store alike.

A new store joins by its name in `STORES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gapless.errors import ConflictError, StorageError, UsageError
from gapless.log.base import (
    BelowFloorError,
    Digest,
    Entry,
    Log,
    Owner,
    OwnerId,
    Run,
    SessionKey,
    Stored,
    Write,
)
from gapless.log.memory import MemoryLog
from gapless.log.sqlite import SqliteLog
from gapless.protocol.block import encode_event
from gapless.protocol.cursor import MAX_SEQ, EventId, Link, link_after
from tests.log.written import GRAIN

Clock = Callable[[], float]

STORES: dict[str, Callable[[Path, Clock], Log]] = {
    "memory": lambda _, clock: MemoryLog(clock=clock),
    "sqlite": lambda path, clock: SqliteLog(path / "log.db", synchronous="off", clock=clock),
    "sqlite, no cache": lambda path, clock: SqliteLog(
        path / "log.db", synchronous="off", cache_bytes=0, clock=clock
    ),
    "sqlite, inline": lambda path, clock: SqliteLog(
        path / "log.db", synchronous="off", clock=clock, inline=True
    ),
}

PLENTY = 2**30


@pytest.fixture(params=STORES)
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Log]:
    ticks = count(1000)
    log = STORES[request.param](tmp_path, lambda: float(next(ticks)))
    await log.start()
    yield log
    await log.close()


def key(name: str) -> SessionKey:
    return SessionKey(sha256(name.encode()).digest())


def entry(number: int, data: bytes = b'{"id":1}') -> Entry:
    return Entry(number, Digest(sha256(data).digest()[:16]), data)


@dataclass
class Session:
    """One session as its owner sees it: every block and link it has ever written."""

    log: Log
    key: SessionKey
    blocks: list[bytes] = field(default_factory=list[bytes])
    links: list[Link] = field(default_factory=list[Link])

    @classmethod
    async def open(cls, log: Log, name: str = "session") -> Session:
        session = cls(log, key(name), links=[Link(sha256(name.encode()).digest()[:8])])
        await log.create(session.key, b"new", session.links[0])
        return session

    def write(self, events: int = 0, **more: Any) -> Write:
        """The next write, not yet committed: `events` new events of various sizes."""
        expect = len(self.blocks)
        for seq in range(expect + 1, expect + events + 1):
            data = b'{"n":%d,"x":"%s"}' % (seq, b"x" * (seq * 7 % 40))
            kind = "message" if seq % 5 else "upgrade-accepted"
            self.links.append(link_after(self.links[-1], seq % 3, kind, data))
            self.blocks.append(encode_event(EventId(seq, seq % 3, self.links[-1]), kind, data))
        if "floor" in more:
            more["floor_link"] = self.links[more["floor"]]
        segment = b"".join(self.blocks[expect:])
        return Write(expect, segment, expect + events, self.links[-1], **more)

    async def commit(self, events: int = 0, **more: Any) -> None:
        await self.log.commit(self.key, self.write(events, **more))

    async def read(self, after: int = 0, upto: int = MAX_SEQ, limit: int = PLENTY) -> tuple[bytes, int]:
        return await self.log.read(self.key, after, upto, limit)

    async def link(self, seq: int) -> Link | None:
        return await self.log.link(self.key, seq)

    async def state(self) -> tuple[Stored, tuple[bytes, int], tuple[Entry, ...], list[Link | None]]:
        """All that the log tells of the session."""
        stored = await self.log.load(self.key)
        assert stored is not None
        return (
            stored,
            await self.read(after=stored.floor),
            await self.log.entries(self.key, 0, 1000),
            [await self.link(seq) for seq in range(stored.committed + 2)],
        )

    def expected(self, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """What a read has to return, by the plainest means."""
        data, last = b"", after
        for block in self.blocks[after:upto]:
            if data and len(data) + len(block) > limit:
                break
            data, last = data + block, last + 1
        return data, last


# --- Opening --------------------------------------------------------------------------------


async def test_a_new_session_is_empty_and_has_its_link(log: Log) -> None:
    session = await Session.open(log)
    stored = await log.load(session.key)
    assert stored is not None
    assert (stored.key, stored.record) == (session.key, b"new")
    assert (stored.committed, stored.floor, stored.received, stored.dispatched, stored.fence) == (0,) * 5
    assert stored.link == stored.floor_link == await session.link(0) == session.links[0]
    assert stored.created == stored.updated == 1000
    assert await session.read() == (b"", 0)
    assert await log.entries(session.key, 0, 10) == ()


async def test_a_session_is_created_once(log: Log) -> None:
    session = await Session.open(log)
    before = await session.state()
    with pytest.raises(ConflictError):
        await log.create(session.key, b"other", Link(b"87654321"))
    assert await session.state() == before


async def test_of_two_that_create_the_same_session_at_once_one_succeeds(log: Log) -> None:
    outcomes = await asyncio.gather(
        *(log.create(key("one"), b"%d" % number, Link(b"12345678")) for number in range(2)),
        return_exceptions=True,
    )
    assert sorted(map(type, outcomes), key=str) == [type(None), ConflictError]
    stored = await log.load(key("one"))
    assert stored is not None
    assert stored.record == b"%d" % outcomes.index(None)


async def test_an_unknown_session_has_nothing(log: Log) -> None:
    unknown = key("unknown")
    assert await log.load(unknown) is None
    assert await log.link(unknown, 0) is None
    assert await log.digest(unknown, 1) is None
    assert await log.entries(unknown, 0, 10) == ()
    assert await log.read(unknown, 3, 10, PLENTY) == (b"", 3)
    assert await log.sessions() == ()


async def test_closing_twice_is_no_error(log: Log) -> None:
    await log.close()
    await log.close()


# --- Committing -----------------------------------------------------------------------------


async def test_a_write_is_there_in_full_when_its_commit_returns(log: Log) -> None:
    session = await Session.open(log)
    entries = (entry(1, b"one"), entry(2, b""))
    await session.commit(3, entries=entries, dispatched=1, record=b"state", floor=1)
    stored = await log.load(session.key)
    assert stored is not None
    assert (stored.committed, stored.link) == (3, session.links[3])
    assert (stored.floor, stored.floor_link) == (1, session.links[1])
    assert (stored.received, stored.dispatched, stored.record) == (2, 1, b"state")
    assert (stored.created, stored.updated) == (1000, 1001)
    assert await session.read(after=1) == (b"".join(session.blocks[1:]), 3)
    assert [await session.link(seq) for seq in range(5)] == [None, *session.links[1:], None]
    assert await log.entries(session.key, 0, 10) == entries
    assert await log.digest(session.key, 2) == entries[1].digest
    assert await log.digest(session.key, 3) is None
    assert await log.digest(session.key, 0) is None


async def test_a_write_changes_only_what_it_names(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(4, entries=(entry(1),), dispatched=1, record=b"state", floor=2)
    first = await log.load(session.key)
    assert first is not None
    await session.commit(record=b"other")
    await session.commit(dispatched=0)
    assert await log.load(session.key) == replace(first, record=b"other", dispatched=0, updated=1003)
    await session.commit(entries=(entry(2),))
    assert await log.load(session.key) == replace(
        first, record=b"other", dispatched=0, received=2, updated=1004
    )


async def test_writes_follow_each_other(log: Log) -> None:
    session = await Session.open(log)
    for events in (1, 3, 0, 2):
        await session.commit(events, record=b"%d" % events)
    stored = await log.load(session.key)
    assert stored is not None
    assert (stored.committed, stored.record) == (6, b"2")
    assert await session.read() == (b"".join(session.blocks), 6)


async def test_a_write_that_expects_another_committed_changes_nothing(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(2)
    before = await session.state()
    for expect in (0, 1, 3):
        write = session.write(1, entries=(entry(1),), dispatched=1, record=b"no", floor=1)
        session.blocks.pop()
        session.links.pop()
        with pytest.raises(ConflictError, match=f"at event 2 .* follows event {expect}"):
            await log.commit(session.key, structs.replace(write, expect=expect, last=expect + 1))
        with pytest.raises(ConflictError):
            await log.commit(session.key, Write(expect, b"", expect, session.links[-1], record=b"no"))
    assert await session.state() == before


async def test_a_write_whose_messages_do_not_follow_changes_nothing(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(1, entries=(entry(1), entry(2)))
    before = await session.state()
    write = structs.replace(session.write(1, record=b"no"), link=Link(b"another!"))
    for entries in ((entry(4),), (entry(2), entry(3)), (entry(2, b"another"),)):
        with pytest.raises(ConflictError):
            await log.commit(session.key, structs.replace(write, entries=entries))
        with pytest.raises(ConflictError):
            await log.commit(session.key, Write(1, b"", 1, session.links[1], entries=entries))
    assert await session.state() == before


async def test_a_write_to_an_unknown_session_is_refused(log: Log) -> None:
    session = Session(log, key("unknown"), links=[Link(b"12345678")])
    with pytest.raises(ConflictError, match="no such session"):
        await session.commit(1)
    assert await log.load(session.key) is None


async def test_a_write_of_many_events_and_messages_is_one_step(log: Log) -> None:
    session = await Session.open(log)
    entries = tuple(entry(number, b"%d" % number) for number in range(1, 601))
    await session.commit(300, entries=entries)
    assert await session.read() == (b"".join(session.blocks), 300)
    assert await log.entries(session.key, 0, 1000) == entries


CONTRADICTIONS: dict[str, Callable[[Write], Write]] = {
    "a segment without events": lambda write: structs.replace(write, last=write.expect),
    "events without a segment": lambda write: structs.replace(write, segment=b""),
    "a last below the first": lambda write: structs.replace(write, last=write.expect - 1),
    "a hole between entries": lambda write: structs.replace(write, entries=(entry(1), entry(3))),
    "a floor without its link": lambda write: structs.replace(write, floor=1),
    "a floor link without a floor": lambda write: structs.replace(write, floor_link=write.link),
    "a floor above the last": lambda write: structs.replace(
        write, floor=write.last + 1, floor_link=write.link
    ),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
async def test_a_write_that_contradicts_itself_is_an_error_of_its_caller(
    log: Log, contradiction: str
) -> None:
    session = await Session.open(log)
    before = await session.state()
    with pytest.raises(UsageError):
        await log.commit(session.key, CONTRADICTIONS[contradiction](session.write(2)))
    assert await session.state() == before


# --- Trying again, after an error that left the outcome unknown -----------------------------


@pytest.mark.parametrize("events", [0, 2])
@pytest.mark.parametrize("entries", [(), (entry(1), entry(2, b"two"))])
async def test_a_write_that_had_landed_is_recognised(
    log: Log, events: int, entries: tuple[Entry, ...]
) -> None:
    session = await Session.open(log)
    write = session.write(events, entries=entries, dispatched=len(entries), record=b"state")
    await log.commit(session.key, write)
    stored, *content = await session.state()
    await log.commit(session.key, write)
    again, *same = await session.state()
    assert same == content
    assert replace(again, updated=stored.updated) == stored
    await session.commit(1, entries=(entry(len(entries) + 1),))
    assert await session.read() == (b"".join(session.blocks), events + 1)


async def test_a_write_that_had_landed_with_its_own_eviction_is_recognised(log: Log) -> None:
    session = await Session.open(log)
    write = session.write(2, floor=2)
    await log.commit(session.key, write)
    before = await session.state()
    await log.commit(session.key, write)
    assert await session.state() == before
    assert await session.read(after=2) == (b"", 2)


async def test_another_write_of_the_same_numbers_is_not_taken_for_one_that_landed(log: Log) -> None:
    session = await Session.open(log)
    write = session.write(2, entries=(entry(1),))
    await log.commit(session.key, write)
    before = await session.state()
    with pytest.raises(ConflictError):
        await log.commit(session.key, structs.replace(write, link=Link(b"another!")))
    with pytest.raises(ConflictError):
        await log.commit(session.key, structs.replace(write, entries=(entry(1, b"another"),)))
    with pytest.raises(ConflictError):
        await log.commit(session.key, Write(2, b"", 2, session.links[2], entries=(entry(1, b"another"),)))
    assert await session.state() == before


async def test_a_write_that_had_landed_under_a_fence_now_passed_is_refused(log: Log) -> None:
    session = await Session.open(log)
    write = session.write(1)
    await log.commit(session.key, write)
    await log.acquire(session.key, 0)
    with pytest.raises(ConflictError, match="under fence 0"):
        await log.commit(session.key, write)


# --- Owners ---------------------------------------------------------------------------------


@pytest.mark.rule("N1")
async def test_acquiring_raises_the_fence_by_one_and_changes_nothing_but_the_owner(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(1)
    before = await log.load(session.key)
    assert before is not None
    assert [await log.acquire(session.key, fence, OwnerId(7)) for fence in range(3)] == [1, 2, 3]
    assert await log.load(session.key) == replace(before, fence=3, owner=7)
    assert await log.acquire(session.key, 3) == 4
    assert await log.load(session.key) == replace(before, fence=4, owner=None)


@pytest.mark.rule("N1")
async def test_of_many_that_acquire_at_once_from_under_one_fence_one_succeeds(log: Log) -> None:
    session = await Session.open(log)
    owners = [await log.join(str(number)) for number in range(5)]
    for fence in range(3):
        outcomes = await asyncio.gather(
            *(log.acquire(session.key, fence, owner) for owner in owners), return_exceptions=True
        )
        (winner,) = [owner for owner, won in zip(owners, outcomes, strict=True) if won == fence + 1]
        assert [type(outcome) for outcome in outcomes].count(ConflictError) == 4
        stored = await log.load(session.key)
        assert stored is not None
        assert (stored.fence, stored.owner) == (fence + 1, winner)


@pytest.mark.parametrize("fence", [-1, 0, 2])
async def test_acquiring_from_under_another_fence_changes_nothing(log: Log, fence: int) -> None:
    owner, other = await log.join("a"), await log.join("b")
    session = await Session.open(log)
    await log.acquire(session.key, 0, owner)
    before = await session.state(), await log.owners()
    with pytest.raises(ConflictError, match=f"under fence 1 by now, not {fence}"):
        await log.acquire(session.key, fence, other)
    assert (await session.state(), await log.owners()) == before


async def test_an_unknown_session_cannot_be_acquired(log: Log) -> None:
    with pytest.raises(ConflictError, match="no such session"):
        await log.acquire(key("unknown"), 0)


async def test_owners_are_known_until_they_leave_and_their_numbers_are_not_given_again(log: Log) -> None:
    first, second = await log.join("/run/a.sock"), await log.join("")
    assert await log.owners() == (Owner(first, "/run/a.sock", 0, 0), Owner(second, "", 0, 0))
    for _ in range(2):
        await log.leave(second)
        assert await log.owners() == (Owner(first, "/run/a.sock", 0, 0),)
    third = await log.join("c")
    assert len({first, second, third}) == 3
    assert [owner.id for owner in await log.owners()] == [first, third]


async def test_many_that_join_at_once_have_numbers_of_their_own(log: Log) -> None:
    joined = await asyncio.gather(*(log.join(str(number)) for number in range(300)))
    assert {owner.id: owner.address for owner in await log.owners()} == {
        owner: str(number) for number, owner in enumerate(joined)
    }


@pytest.mark.rule("N1")
async def test_a_beat_shows_life_and_tells_of_losses_to_others_only(log: Log) -> None:
    one, two = await log.join("one"), await log.join("two")
    session, other = await Session.open(log), await Session.open(log, "other")
    assert [await log.beat(one) for _ in range(2)] == [0, 0]
    await log.acquire(session.key, 0, one)
    await log.acquire(session.key, 1, one)
    await log.acquire(other.key, 0, one)
    assert await log.beat(one) == 0
    await log.acquire(session.key, 2, two)
    assert (await log.beat(one), await log.beat(two)) == (1, 0)
    await log.acquire(other.key, 1)
    assert (await log.beat(one), await log.beat(two)) == (2, 0)
    assert await log.owners() == (Owner(one, "one", 5, 2), Owner(two, "two", 2, 0))


async def test_an_owner_that_was_struck_off_learns_of_it_from_its_beat(log: Log) -> None:
    owner = await log.join("")
    await log.leave(owner)
    for unknown in (owner, OwnerId(0), OwnerId(99)):
        with pytest.raises(ConflictError, match="registered no more"):
            await log.beat(unknown)
    assert await log.owners() == ()


async def test_the_sessions_of_an_owner_are_those_created_or_acquired_for_it(log: Log) -> None:
    one, two = await log.join("one"), await log.join("two")
    for number, owner in enumerate((one, one, two, None)):
        await log.create(key(str(number)), b"", Link(b"12345678"), owner)
    await log.acquire(key("3"), 0, two)
    await log.acquire(key("0"), 0, two)
    assert await log.owned(one) == {key("1")}
    assert await log.owned(two) == {key("0"), key("2"), key("3")}
    await log.remove(key("2"))
    assert await log.owned(two) == {key("0"), key("3")}
    await log.acquire(key("3"), 1)
    assert await log.owned(two) == {key("0")}
    assert [stored.owner for stored in await log.sessions()] == [two, one, None]
    assert await log.owned(OwnerId(99)) == frozenset()


@pytest.mark.rule("N1")
async def test_what_an_owner_had_when_it_left_can_still_be_told_and_taken(log: Log) -> None:
    gone, heir = await log.join("gone"), await log.join("heir")
    await log.create(key("one"), b"", Link(b"12345678"), gone)
    await log.leave(gone)
    stored = await log.load(key("one"))
    assert stored is not None
    assert stored.owner == gone
    assert await log.owned(gone) == {key("one")}
    assert await log.acquire(key("one"), 0, heir) == 1
    assert await log.owners() == (Owner(heir, "heir", 0, 0),)


async def test_a_write_under_an_older_fence_changes_nothing(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(1)
    fence = await log.acquire(session.key, 0)
    before = await session.state()
    write = session.write(1, entries=(entry(1),), dispatched=1, record=b"no", floor=1)
    for late in (write, Write(1, b"", 1, session.links[1], record=b"no")):
        with pytest.raises(ConflictError, match=r"under fence 1; .* under fence 0"):
            await log.commit(session.key, late)
    assert await session.state() == before
    await log.commit(session.key, structs.replace(write, fence=fence))
    assert await session.read(after=1) == (session.blocks[1], 2)


# --- Reading --------------------------------------------------------------------------------


async def test_a_read_returns_whole_blocks_as_they_were_written(log: Log) -> None:
    session = await Session.open(log)
    for events in (1, 4, 2, 7, 1, 1):
        await session.commit(events)
    size = len(b"".join(session.blocks))
    for after in range(17):
        for upto in (0, after, after + 1, 5, 9, 15, 16, 17, MAX_SEQ):
            for limit in (-1, 0, 1, 60, 120, 200, 350, size - 1, size):
                result = await session.read(after, upto, limit)
                assert result == session.expected(after, upto, limit), (after, upto, limit)


async def test_a_read_fills_its_limit_exactly(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(3)
    await session.commit(3)
    for last in range(1, 7):
        size = len(b"".join(session.blocks[:last]))
        assert await session.read(limit=size) == (b"".join(session.blocks[:last]), last)
        assert (await session.read(limit=size - 1))[1] == max(last - 1, 1)


async def test_reads_one_after_another_return_every_event_once(log: Log) -> None:
    session = await Session.open(log)
    for events in (3, 1, 5, 2):
        await session.commit(events)
    data, position = b"", 0
    while position < 11:
        chunk, position = await session.read(after=position, limit=150)
        data += chunk
    assert data == b"".join(session.blocks)
    assert await session.read(after=position) == (b"", 11)


async def test_links_are_known_from_the_floor_to_the_last_event(log: Log) -> None:
    session = await Session.open(log)
    for events in (1, 12, 3):
        await session.commit(events)
    assert [await session.link(seq) for seq in range(18)] == [*session.links, None]


async def test_inbox_messages_are_read_in_order_from_any_number(log: Log) -> None:
    session = await Session.open(log)
    entries = [entry(number, b"%d" % number) for number in range(1, 8)]
    await session.commit(entries=tuple(entries[:1]))
    await session.commit(entries=tuple(entries[1:]))
    for after in range(9):
        for limit in (-1, 0, 1, 3, 100):
            expected = tuple(entries[after : after + max(limit, 0)])
            assert await log.entries(session.key, after, limit) == expected
    assert [await log.digest(session.key, e.number) for e in entries] == [e.digest for e in entries]


# --- Runs -----------------------------------------------------------------------------------


async def test_runs_are_what_is_retained_with_its_size_its_streams_and_its_links(log: Log) -> None:
    session = await Session.open(log)
    assert await log.runs(session.key, GRAIN) == ()
    for events in (1, 4, 2):
        await session.commit(events)
    (run,) = await log.runs(session.key, GRAIN)
    assert run == Run(
        last=7,
        link=session.links[7],
        events=7,
        size=len(b"".join(session.blocks)),
        at=1001,
        streams={0: (6, session.links[6]), 1: (7, session.links[7]), 2: (5, session.links[5])},
    )


@pytest.mark.parametrize("floor", range(1, 8))
async def test_runs_have_nothing_that_is_at_or_below_the_floor(log: Log, floor: int) -> None:
    session = await Session.open(log)
    for events in (2, 3, 2):
        await session.commit(events)
    await session.commit(floor=floor)
    runs = await log.runs(session.key, GRAIN)
    assert sum(run.events for run in runs) == 7 - floor
    assert sum(run.size for run in runs) == len(b"".join(session.blocks[floor:]))
    streams: dict[int, tuple[int, Link]] = {}
    for seq in range(floor + 1, 8):
        streams[seq % 3] = (seq, session.links[seq])
    assert [run.streams for run in runs] == ([streams] if streams else [])


async def test_runs_are_neither_many_small_ones_nor_large(log: Log) -> None:
    session = await Session.open(log)
    for _ in range(1500):
        await session.commit(1)
    runs = await log.runs(session.key, GRAIN)
    assert 1500 / 1024 < len(runs) < 60  # a commit a second
    assert [run.last for run in runs] == [min(last, 1500) for last in range(61, 1561, 61)]


async def test_an_unknown_session_has_no_runs(log: Log) -> None:
    assert await log.runs(key("unknown"), GRAIN) == ()


# --- Damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["no events", "an event is missing", "cut short"])
async def test_damaged_events_are_an_error_that_says_so(log: Log, damage: str) -> None:
    session = await Session.open(log)
    write = session.write(5)
    segment = {
        "no events": b"\xa5" * len(write.segment),
        "an event is missing": write.segment.replace(session.blocks[2], b""),
        "cut short": write.segment[:-20],  # within the last event, behind its ID
    }[damage]
    await log.commit(session.key, structs.replace(write, segment=segment))
    await session.commit(1)
    steps: list[Coroutine[Any, Any, Any]] = [session.read(after=2), log.runs(session.key, GRAIN)]
    if damage != "cut short":
        steps += [session.read(after=2, limit=1), session.link(3)]
    for step in steps:
        with pytest.raises(StorageError, match="is damaged"):
            await step
    assert await session.read(after=5) == (session.blocks[5], 6)
    assert await session.link(6) == session.links[6]


# --- The floor ------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", range(1, 10))
async def test_after_an_eviction_only_what_is_above_the_floor_remains(log: Log, floor: int) -> None:
    session = await Session.open(log)
    for events in (2, 4, 3):
        await session.commit(events)
    await session.commit(floor=floor)
    stored = await log.load(session.key)
    assert stored is not None
    assert (stored.floor, stored.floor_link, stored.committed) == (floor, session.links[floor], 9)
    assert await session.read(after=floor) == (b"".join(session.blocks[floor:]), 9)
    assert await session.read(after=9) == (b"", 9)
    for after in range(floor):
        for upto in (after, floor, 9):
            with pytest.raises(BelowFloorError):
                await session.read(after=after, upto=upto)
    links = [await session.link(seq) for seq in range(11)]
    assert links == [None] * floor + session.links[floor:] + [None]


async def test_a_floor_never_falls(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(6)
    for floor, effective in ((3, 3), (1, 3), (3, 3), (5, 5), (0, 5)):
        await session.commit(floor=floor)
        stored = await log.load(session.key)
        assert stored is not None
        assert (stored.floor, stored.floor_link) == (effective, session.links[effective])
        assert await session.read(after=effective) == (b"".join(session.blocks[effective:]), 6)
        with pytest.raises(BelowFloorError):
            await session.read(after=effective - 1)


async def test_events_follow_an_outbox_that_is_evicted_entirely(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(2)
    await session.commit(1, floor=3)
    assert await session.read(after=3) == (b"", 3)
    await session.commit(2)
    assert await session.read(after=3) == (b"".join(session.blocks[3:]), 5)
    assert await session.link(3) == session.links[3]


async def test_an_eviction_of_very_many_writes_is_complete_at_once(log: Log) -> None:
    session = await Session.open(log)
    for _ in range(600):
        await session.commit(1)
    await session.commit(floor=599)
    assert await session.read(after=599) == (session.blocks[599], 600)
    with pytest.raises(BelowFloorError):
        await session.read(after=598)
    assert await session.link(598) is None


async def test_an_eviction_leaves_the_inbox_alone(log: Log) -> None:
    session = await Session.open(log)
    await session.commit(2, entries=(entry(1), entry(2)))
    await session.commit(floor=2)
    assert await log.entries(session.key, 0, 10) == (entry(1), entry(2))


# --- Many sessions --------------------------------------------------------------------------


async def test_sessions_that_commit_at_once_keep_apart(log: Log) -> None:
    sessions = [await Session.open(log, str(number)) for number in range(20)]

    async def live(session: Session, events: int) -> None:
        for number in range(1, 6):
            await session.commit(events, entries=(entry(number, session.key),), record=session.key)

    await asyncio.gather(*(live(session, events) for events, session in enumerate(sessions)))
    for events, session in enumerate(sessions):
        assert await session.read() == (b"".join(session.blocks), events * 5)
        assert await log.entries(session.key, 0, 9) == tuple(entry(n, session.key) for n in range(1, 6))
        stored = await log.load(session.key)
        assert stored is not None
        assert stored.record == session.key


async def test_of_writes_made_at_once_only_those_that_conflict_fail(log: Log) -> None:
    sessions = [await Session.open(log, str(number)) for number in range(6)]
    writes = [session.write(2, entries=(entry(1),)) for session in sessions]
    await log.acquire(sessions[1].key, 0)
    writes[3] = structs.replace(writes[3], expect=7, last=9)
    writes[4] = structs.replace(writes[4], entries=(entry(2),))
    outcomes = await asyncio.gather(
        *(log.commit(session.key, write) for session, write in zip(sessions, writes, strict=True)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        ConflictError,
        type(None),
        ConflictError,
        ConflictError,
        type(None),
    ]
    for session, outcome in zip(sessions, outcomes, strict=True):
        landed = outcome is None
        assert await session.read() == ((b"".join(session.blocks), 2) if landed else (b"", 0))
        assert await log.entries(session.key, 0, 10) == ((entry(1),) if landed else ())


async def test_sessions_are_listed_oldest_first(log: Log) -> None:
    names = ["b", "c", "a", "e", "d"]
    sessions = [await Session.open(log, name) for name in names]
    await sessions[2].commit(1)
    listed = await log.sessions()
    assert [stored.key for stored in listed] == [key(name) for name in names]
    assert [stored.committed for stored in listed] == [0, 0, 1, 0, 0]
    assert [stored.created for stored in listed] == [1000, 1001, 1002, 1003, 1004]
    assert listed[2] == await log.load(key("a"))


async def test_a_removed_session_is_forgotten_and_no_other(log: Log) -> None:
    session = await Session.open(log)
    other = await Session.open(log, "other")
    for one in (session, other):
        await one.commit(3, entries=(entry(1),))
    before = await other.state()
    await log.remove(session.key)
    assert await log.load(session.key) is None
    assert await session.link(0) is None
    assert await session.link(3) is None
    assert await session.read() == (b"", 0)
    assert await log.digest(session.key, 1) is None
    assert await log.entries(session.key, 0, 10) == ()
    with pytest.raises(ConflictError):
        await session.commit(1)
    assert await log.sessions() == (await log.load(other.key),)
    assert await other.state() == before


async def test_what_is_released_is_read_as_before(log: Log) -> None:
    session = await Session.open(log)
    for events in (3, 2):
        await session.commit(events)
        log.release(session.key)
        assert await session.read(1, MAX_SEQ, 2**20) == session.expected(1, MAX_SEQ, 2**20)


async def test_removing_what_is_not_there_is_no_error(log: Log) -> None:
    session = await Session.open(log)
    for _ in range(2):
        await log.remove(session.key)


async def test_a_removed_session_can_be_created_anew_and_is_empty(log: Log) -> None:
    session = await Session.open(log)
    for _ in range(300):
        await session.commit(1)
    await session.commit(entries=tuple(entry(number) for number in range(1, 301)))
    await log.acquire(session.key, 0)
    await log.remove(session.key)
    again = await Session.open(log)
    stored = await log.load(again.key)
    assert stored is not None
    assert (stored.committed, stored.received, stored.fence, stored.floor) == (0, 0, 0, 0)
    assert await again.read() == (b"", 0)
    await again.commit(1, entries=(entry(1),))
    assert await again.read() == (again.blocks[0], 1)
    assert await log.entries(again.key, 0, 10) == (entry(1),)


# --- In memory only -------------------------------------------------------------------------


def test_no_coroutine_of_a_memory_log_suspends() -> None:
    log = MemoryLog()
    one, link = key("one"), Link(b"12345678")
    write = Write(0, b"id: 1.0.0000000000000000\ndata: {}\n\n", 1, Link(b"\0" * 8), entries=(entry(1),))
    steps: list[Coroutine[Any, Any, Any]] = [
        log.start(),
        log.create(one, b"", link),
        log.commit(one, write),
        log.join(""),
        log.beat(OwnerId(1)),
        log.owners(),
        log.owned(OwnerId(1)),
        log.acquire(one, 0, OwnerId(1)),
        log.leave(OwnerId(1)),
        log.load(one),
        log.read(one, 0, 9, 9),
        log.runs(one, GRAIN),
        log.link(one, 1),
        log.digest(one, 1),
        log.entries(one, 0, 9),
        log.sessions(),
        log.remove(one),
        log.close(),
    ]
    for step in steps:
        with pytest.raises(StopIteration):
            step.send(None)


async def test_a_copy_of_a_memory_log_goes_its_own_way() -> None:
    log = MemoryLog()
    session = await Session.open(log)
    owner = await log.join("")
    await log.acquire(session.key, 0, owner)
    await session.commit(3, entries=(entry(1),), fence=1)
    before = await session.state(), await log.owners(), await log.runs(session.key, GRAIN)
    copy = replace(session, log=log.copy(), blocks=session.blocks.copy(), links=session.links.copy())
    assert (await copy.state(), await copy.log.owners(), await copy.log.runs(copy.key, GRAIN)) == before
    await copy.commit(2, entries=(entry(2),), record=b"copy", floor=4, fence=1)
    assert await copy.log.acquire(copy.key, 1) == 2
    assert await copy.log.beat(owner) == 1
    assert await copy.log.join("") != owner
    await Session.open(copy.log, "another")
    assert (await session.state(), await log.owners(), await log.runs(session.key, GRAIN)) == before
    assert await copy.read(after=4) == (copy.blocks[4], 5)
    assert len(await log.sessions()) == 1
