"""A log in memory: the contract at its plainest, for tests, models and sessions that may die."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gapless.errors import ConflictError
from gapless.log.base import Digest, Durability, Entry, Log, SessionKey, Stored, Write
from gapless.log.segments import Segments, check, conflict, fits, landed
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

    def copy(self) -> MemoryLog:
        """An independent log with the same content. Cheap: what is immutable is shared."""
        twin = MemoryLog(clock=self._clock)
        twin._sessions = {
            key: _Session(session.stored, session.outbox.copy(), session.inbox.copy())
            for key, session in self._sessions.items()
        }
        return twin

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to release: the content lives as long as this object."""

    async def create(self, key: SessionKey, record: bytes, link: Link) -> None:
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
        )
        self._sessions[key] = _Session(stored, Segments(), [])

    async def load(self, key: SessionKey) -> Stored | None:
        session = self._sessions.get(key)
        return None if session is None else session.stored

    async def acquire(self, key: SessionKey) -> int:
        session = self._sessions.get(key)
        if session is None:
            raise ConflictError("there is no such session in the log")
        session.stored = replace(session.stored, fence=session.stored.fence + 1)
        return session.stored.fence

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
        if write.segment:
            session.outbox.append(write.last, write.segment)
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
            updated=self._clock(),
        )

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        session = self._sessions.get(key)
        return (b"", after) if session is None else session.outbox.read(after, upto, limit)

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

    async def sessions(self) -> tuple[Stored, ...]:
        return tuple(session.stored for session in self._sessions.values())

    async def remove(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
