"""A log in memory: the contract at its plainest, for tests, models and sessions that may die."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gapless.errors import ConflictError
from gapless.log.base import (
    Digest,
    Durability,
    Entry,
    Grain,
    Log,
    Owner,
    OwnerId,
    Run,
    SessionKey,
    Stored,
    Write,
)
from gapless.log.runs import runs_of
from gapless.log.segments import Segments, check, conflict, fits, landed, outrun
from gapless.protocol.cursor import Link

__all__ = ["MemoryLog"]


@dataclass(slots=True)
class _Session:
    stored: Stored
    outbox: Segments
    inbox: list[Entry]

    def digest(self, number: int) -> Digest | None:
        return self.inbox[number - 1].digest if 0 < number <= len(self.inbox) else None


class MemoryLog(Log):
    """A log that is gone with its process. No coroutine of it ever suspends.

    Args:
        clock: the Unix time, in seconds.
    """

    durability = Durability.MEMORY

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[SessionKey, _Session] = {}
        self._owners: dict[OwnerId, Owner] = {}
        self._joined = 0

    def copy(self) -> MemoryLog:
        """An independent log with the same content. Cheap: what is immutable is shared."""
        twin = MemoryLog(clock=self._clock)
        twin._sessions = {
            key: _Session(session.stored, session.outbox.copy(), session.inbox.copy())
            for key, session in self._sessions.items()
        }
        twin._owners = self._owners.copy()
        twin._joined = self._joined
        return twin

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to release: the content lives as long as this object."""

    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        if key in self._sessions:
            raise ConflictError("the session exists in the log already")
        now = self._clock()
        stored = Stored(
            key=key,
            record=record,
            committed=0,
            link=link,
            floor=0,
            floor_link=link,
            received=0,
            dispatched=0,
            fence=0,
            created=now,
            updated=now,
            owner=owner,
        )
        self._sessions[key] = _Session(stored, Segments(), [])

    async def load(self, key: SessionKey) -> Stored | None:
        session = self._sessions.get(key)
        return None if session is None else session.stored

    async def join(self, address: str) -> OwnerId:
        self._joined += 1
        owner = OwnerId(self._joined)
        self._owners[owner] = Owner(owner, address, beat=0, losses=0)
        return owner

    async def beat(self, owner: OwnerId) -> int:
        known = self._owners.get(owner)
        if known is None:
            raise ConflictError(f"owner {owner} is registered no more: another took it for dead")
        self._owners[owner] = replace(known, beat=known.beat + 1)
        return known.losses

    async def owners(self) -> tuple[Owner, ...]:
        return tuple(self._owners.values())

    async def leave(self, owner: OwnerId) -> None:
        self._owners.pop(owner, None)

    async def owned(self, owner: OwnerId) -> frozenset[SessionKey]:
        return frozenset(key for key, session in self._sessions.items() if session.stored.owner == owner)

    async def acquire(self, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        session = self._sessions.get(key)
        if session is None or session.stored.fence != fence:
            raise outrun(session and session.stored, fence)
        before = session.stored.owner
        if before is not None and before != owner and before in self._owners:
            loser = self._owners[before]
            self._owners[before] = replace(loser, losses=loser.losses + 1)
        session.stored = replace(session.stored, fence=fence + 1, owner=owner)
        return fence + 1

    async def commit(self, key: SessionKey, write: Write) -> None:
        check(write)
        session = self._sessions.get(key)
        if session is None:
            raise conflict(None, write)
        stored = session.stored
        if not fits(stored, write):
            if landed(stored, write, session.digest):
                return
            raise conflict(stored, write)
        now = self._clock()
        if write.segment:
            session.outbox.append(write.last, write.segment, now)
        session.inbox.extend(write.entries)
        floor, floor_link = stored.floor, stored.floor_link
        if write.floor is not None and write.floor_link is not None and write.floor > floor:
            floor, floor_link = write.floor, write.floor_link
            session.outbox.evict_to(floor)
        session.stored = replace(
            stored,
            record=stored.record if write.record is None else write.record,
            committed=write.last,
            link=write.link,
            floor=floor,
            floor_link=floor_link,
            received=len(session.inbox),
            dispatched=stored.dispatched if write.dispatched is None else write.dispatched,
            updated=now,
        )

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        session = self._sessions.get(key)
        return (b"", after) if session is None else session.outbox.read(after, upto, limit)

    async def runs(self, key: SessionKey, grain: Grain) -> tuple[Run, ...]:
        session = self._sessions.get(key)
        if session is None:
            return ()
        return runs_of(session.outbox, session.stored.floor, session.stored.committed, grain)

    async def link(self, key: SessionKey, seq: int) -> Link | None:
        session = self._sessions.get(key)
        if session is None:
            return None
        if seq == session.stored.floor:
            return session.stored.floor_link
        return session.outbox.link(seq)

    async def digest(self, key: SessionKey, number: int) -> Digest | None:
        session = self._sessions.get(key)
        return None if session is None else session.digest(number)

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        session = self._sessions.get(key)
        return () if session is None else tuple(session.inbox[after : after + max(limit, 0)])

    async def sessions(self, before: float | None = None) -> tuple[Stored, ...]:
        every = (session.stored for session in self._sessions.values())
        return tuple(stored for stored in every if before is None or stored.updated < before)

    async def remove(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    def release(self, key: SessionKey) -> None:
        """Nothing: what is held is the log."""
