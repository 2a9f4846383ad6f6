"""A durable log in one SQLite file, through apsw: WAL, one writer, group commit.

What was written lately is read from a cache on the event loop, the rest over a second connection,
in a thread; the loop waits for no disk.

Several processes may serve one file. Each session has one owner among them (N1): what a write
expects is checked inside its transaction, so an owner that has been replaced is fenced off.
"""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

import apsw

from gapless.errors import ConflictError, StorageError, UsageError
from gapless.log import queries
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
from gapless.log.database import open_database, storage_error
from gapless.log.segments import Ahead, DamagedError, Tails, check, outrun
from gapless.log.threads import Threads, done_by, inline, threads
from gapless.log.writer import REFUSED, Step, Writer
from gapless.protocol.cursor import Link

__all__ = ["SqliteLog"]

_DURABILITY: Final = {"full": Durability.FSYNC, "normal": Durability.OS, "off": Durability.OS}

_AHEAD: Final = 256 * 1024
"""Bytes that are read at a time, at least; what is not asked for yet waits in memory."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Store:
    """What an open log holds. The reader's connection is used in its thread only."""

    writer: Writer
    reader: apsw.Connection
    threads: Threads
    tails: Tails
    ahead: Ahead


class SqliteLog(Log):
    """A log in one SQLite file.

    Args:
        path: the file; made, readable by its owner alone, if there is none.
        synchronous: `full` survives the machine's death, `normal` and `off` only the process's.
        cache_bytes: the most bytes of recent events to hold in memory, over all sessions; half as
            many again are held of what is being read from the disk.
        clock: the Unix time, in seconds.
        inline: do without threads: everything happens on the loop, in an order that repeats itself
            from run to run. For simulations; a server would stand still for each commit.
        vfs: the registered SQLite VFS that all connections use, if not the usual one.

    Raises:
        UsageError: there is no such `synchronous`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: str = "full",
        cache_bytes: int = 16 * 2**20,
        clock: Callable[[], float] = time.time,
        inline: bool = False,
        vfs: str | None = None,
    ) -> None:
        if synchronous not in _DURABILITY:
            raise UsageError(f"synchronous is one of {', '.join(_DURABILITY)}; {synchronous!r} is not")
        self.durability = _DURABILITY[synchronous]
        self.place = self._path = os.path.abspath(path)
        self._synchronous = synchronous
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._inline = inline
        self._vfs = vfs
        self._store: _Store | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        work = inline() if self._inline else threads()
        try:
            writer, reader, files = await loop.run_in_executor(
                work.reader, open_database, self._path, self._synchronous, self._vfs
            )
        except BaseException:
            work.shutdown(wait=False)
            raise
        self._store = _Store(
            writer=Writer(writer, self._path, files, work.writer, work.waiting),
            reader=reader,
            threads=work,
            tails=Tails(self._cache_bytes),
            ahead=Ahead(self._cache_bytes // 2),
        )

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            # Each after all that was handed over to it; the writer last, who tidies up.
            await done_by(store.threads.reader, store.reader.close)
            await done_by(store.threads.writer, store.writer.close)
            store.threads.shutdown()

    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        step = Step("create", key, mark=link, data=record, at=self._clock(), owner=owner)
        if await self._opened.writer.step(step) == REFUSED:
            raise ConflictError("the session exists in the log already")

    async def load(self, key: SessionKey) -> Stored | None:
        return await self._ask(queries.load, key)

    async def join(self, address: str) -> OwnerId:
        return OwnerId(await self._opened.writer.step(Step("join", data=address)))

    async def beat(self, owner: OwnerId) -> int:
        answer = await self._opened.writer.step(Step("beat", owner=owner))
        if answer == REFUSED:
            raise ConflictError(f"owner {owner} is registered no more: another took it for dead")
        return answer - 1

    async def owners(self) -> tuple[Owner, ...]:
        return await self._ask(queries.owners)

    async def leave(self, owner: OwnerId) -> None:
        await self._opened.writer.step(Step("leave", owner=owner))

    async def owned(self, owner: OwnerId) -> frozenset[SessionKey]:
        return await self._ask(queries.owned, owner)

    async def acquire(self, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        answer = await self._opened.writer.step(Step("acquire", key, fence=fence, owner=owner))
        if answer == REFUSED:
            raise outrun(await self.load(key), fence)
        return answer

    async def commit(self, key: SessionKey, write: Write) -> None:
        check(write)
        store = self._opened
        entries = write.entries
        steps = [
            Step(
                "write",
                key,
                write.last,
                write.link,
                write.segment,
                self._clock(),
                None,
                write.fence,
                write.expect,
                entries[0].number - 1 if entries else None,
                entries[-1].number if entries else None,
                write.dispatched,
                write.record,
                write.floor,
                write.floor_link,
            )
        ]
        steps += [Step("entry", key, entry.number, entry.digest, entry.data) for entry in entries]
        if write.floor is not None:
            steps.append(Step("evict", key))
        try:
            if await store.writer.step(*steps) == REFUSED:
                await self._ask(queries.confirm, key, write)
        except BaseException:
            # Refused, failed or cancelled: what the file has of this session is not known here.
            store.tails.forget(key)
            raise
        store.tails.wrote(key, write)
        if write.floor is not None:
            store.ahead.evict_to(key, write.floor)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        store = self._opened
        data, last = store.tails.read(key, after, upto, limit)
        if data:
            return data, last
        run = store.ahead.take(key, after)
        if run is None:
            run = await self._ask(queries.segments, key, after, upto, max(limit, _AHEAD))
        if run is None:
            return b"", after
        try:
            data, last = run.read(after, upto, limit)
        except DamagedError as error:
            raise DamagedError(error.what, self._path) from error
        if last < run.last:
            store.ahead.keep(key, last, run)
        return data, last

    async def runs(self, key: SessionKey, grain: Grain) -> tuple[Run, ...]:
        return await self._ask(queries.runs, key, grain)

    async def link(self, key: SessionKey, seq: int) -> Link | None:
        return self._opened.tails.link(key, seq) or await self._ask(queries.link, key, seq)

    async def digest(self, key: SessionKey, number: int) -> Digest | None:
        return await self._ask(queries.digest, key, number)

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        return await self._ask(queries.entries, key, after, limit)

    async def sessions(self, before: float | None = None) -> tuple[Stored, ...]:
        return await self._ask(queries.sessions, before)

    async def remove(self, key: SessionKey) -> None:
        try:
            await self._opened.writer.step(Step("remove", key))
        finally:
            self.release(key)

    def release(self, key: SessionKey) -> None:
        store = self._store
        if store is not None:
            store.tails.forget(key)
            store.ahead.forget(key)

    @property
    def _opened(self) -> _Store:
        if self._store is None:
            raise StorageError(f"the log {self._path} is not open")
        return self._store

    async def _ask(
        self, query: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query on the reader's connection, in its thread."""
        store = self._opened
        loop = asyncio.get_running_loop()
        try:
            with store.threads.waiting:
                work = partial(query, store.reader, *args, **kwargs)
                return await loop.run_in_executor(store.threads.reader, work)
        except apsw.Error as error:
            raise storage_error(self._path, "read", error) from error
        except DamagedError as error:
            raise DamagedError(error.what, self._path) from error
