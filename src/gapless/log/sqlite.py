"""A durable log in one SQLite file, through apsw: WAL, one writer thread, group commit.

Whatever writes arrive while a commit runs are the next transaction: one thread hand-off, one
statement and one sync of the file for all of them. What was written lately is read from a cache
on the event loop, the rest over a second connection, in a thread; the loop waits for no disk.

One process at a time serves a file. That a second one opens it, in a restart that overlaps, does
no harm: what a write expects is checked inside the transaction, so the older owner is fenced (N1).
"""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import chain, count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import apsw

from gapless.errors import ConflictError, SchemaError, StorageError, UsageError
from gapless.log.base import BelowFloorError, Digest, Durability, Entry, Log, SessionKey, Stored, Write
from gapless.log.segments import Segment, Tails, check, conflict, join, landed
from gapless.protocol.cursor import Link

__all__ = ["APPLICATION_ID", "SCHEMA", "SqliteLog"]

APPLICATION_ID: Final = int.from_bytes(b"Gapl", "big")
"""The `PRAGMA application_id` that marks a file as ours."""

SCHEMA: Final = 1
"""The `PRAGMA user_version` this code reads and writes: the number of the last file in `sql/`."""

_DURABILITY: Final = {"full": Durability.FSYNC, "normal": Durability.OS, "off": Durability.OS}

_BUSY_MS = 5000
"""How long to wait for another process that holds the file locked."""

_CHUNK: Final = 256
"""The most rows one statement takes, and one sweep deletes (as the files in `sql/` have it too)."""

_TURN_EVERY: Final = 0.002
_TURN: Final = 0.00001
"""Seconds between two moments in which the loop stands aside, and of one (some 60 µs in effect)."""

_WIDTH: Final = 15
"""Columns of `step`."""

_REFUSED: Final = 0
"""What `step` answers where it changed nothing."""

_DONE: Final = -1
"""What stands for no answer."""

_STORED: Final = """
    SELECT key, record, committed, link, floor, floor_link, received, dispatched, fence, created, updated
    FROM session"""

_Value = bytes | str | int | float | None
_Row = tuple[_Value, ...]
P = ParamSpec("P")
T = TypeVar("T")


class SqliteLog(Log):
    """A log in one SQLite file.

    Args:
        path: the file; made, readable by its owner alone, if there is none.
        synchronous: `full` survives the machine's death, `normal` and `off` only the process's.
        cache_bytes: the most bytes of recent events to hold in memory, over all sessions.
        clock: the Unix time, in seconds.

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
    ) -> None:
        if synchronous not in _DURABILITY:
            raise UsageError(f"synchronous is one of {', '.join(_DURABILITY)}; {synchronous!r} is not")
        self.durability = _DURABILITY[synchronous]
        self._path = os.path.abspath(path)
        self._synchronous = synchronous
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._numbers = count()
        self._store: _Store | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "gapless-log-reader")
        try:
            writer, reader = await loop.run_in_executor(thread, _open, self._path, self._synchronous)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        turns = _Turns(loop)
        self._store = _Store(
            writer=_Writer(writer, self._path, loop, turns),
            reader=reader,
            thread=thread,
            turns=turns,
            tails=Tails(self._cache_bytes),
        )

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(store.thread, store.close)
            store.thread.shutdown()

    async def create(self, key: SessionKey, record: bytes, link: Link) -> None:
        number = next(self._numbers)
        row = _row("create", number, key, None, link, record, self._clock())
        if await self._opened.writer.step(number, [row]) == _REFUSED:
            raise ConflictError("the session exists in the log already")

    async def load(self, key: SessionKey) -> Stored | None:
        return await self._ask(_load, key)

    async def acquire(self, key: SessionKey) -> int:
        number = next(self._numbers)
        fence = await self._opened.writer.step(number, [_row("acquire", number, key)])
        if fence == _REFUSED:
            raise ConflictError("there is no such session in the log")
        return fence

    async def commit(self, key: SessionKey, write: Write) -> None:
        check(write)
        store = self._opened
        number = next(self._numbers)
        entries = write.entries
        rows: list[_Row] = [
            (
                "write",
                number,
                key,
                write.last,
                write.link,
                write.segment,
                self._clock(),
                write.expect,
                write.fence,
                entries[0].number - 1 if entries else None,
                entries[-1].number if entries else None,
                write.dispatched,
                write.record,
                write.floor,
                write.floor_link,
            )
        ]
        rows += [_row("entry", number, key, entry.number, entry.digest, entry.data) for entry in entries]
        if write.floor is not None:
            rows.append(_row("evict", number, key))
        try:
            if await store.writer.step(number, rows) == _REFUSED:
                await self._ask(_confirm, key, write)
        except BaseException:
            # Refused, failed or cancelled: what the file has of this session is not known here.
            store.tails.forget(key)
            raise
        store.tails.wrote(key, write)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        data, last = self._opened.tails.read(key, after, upto, limit)
        return (data, last) if data else await self._ask(_read, key, after, upto, limit)

    async def link(self, key: SessionKey, seq: int) -> Link | None:
        return self._opened.tails.link(key, seq) or await self._ask(_link, key, seq)

    async def digest(self, key: SessionKey, number: int) -> Digest | None:
        return await self._ask(_digest, key, number)

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        return await self._ask(_entries, key, after, limit)

    async def sessions(self) -> tuple[Stored, ...]:
        return await self._ask(_sessions)

    async def remove(self, key: SessionKey) -> None:
        store = self._opened
        number = next(self._numbers)
        try:
            await store.writer.step(number, [_row("remove", number, key)])
        finally:
            store.tails.forget(key)

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
            with store.turns:
                return await loop.run_in_executor(store.thread, partial(query, store.reader, *args, **kwargs))
        except apsw.Error as error:
            raise _storage_error(self._path, "read", error) from error


def _row(*values: _Value) -> _Row:
    """A row of `step` that needs only its first columns."""
    return values + (None,) * (_WIDTH - len(values))


@cache
def _insert(rows: int) -> str:
    row = f"({', '.join('?' * _WIDTH)})"
    return f"INSERT INTO step VALUES {', '.join([row] * rows)}"


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows for `step`, and who waits for the answer to them."""

    number: int
    rows: list[_Row]
    done: asyncio.Future[int]


class _Turns:
    """Lets threads have the interpreter while somebody on the loop waits for one of them.

    A loop without an idle moment gives the interpreter up once a turn, for less time than a
    thread takes to wake up, and as long as it does so every few milliseconds CPython never makes
    it wait for one. Commits of 20 s were seen that way. So while a thread is waited for, the loop
    stands aside now and then, for just as long as waking up takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting = 0
        self._armed = False

    def __enter__(self) -> None:
        self._waiting += 1
        if not self._armed:
            self._armed = True
            self._loop.call_later(_TURN_EVERY, self._stand_aside)

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1

    def _stand_aside(self) -> None:
        self._armed = self._waiting > 0
        if self._armed:
            time.sleep(_TURN)
            self._loop.call_later(_TURN_EVERY, self._stand_aside)


class _Writer:
    """The one thread that writes: takes what has gathered, commits it, tells those who wait."""

    def __init__(
        self, db: apsw.Connection, path: str, loop: asyncio.AbstractEventLoop, turns: _Turns
    ) -> None:
        self.db = db
        self._path = path
        self._loop = loop
        self._turns = turns
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers: dict[int, int] = {}
        self._litter = True  # until looked: the last process may have left some
        db.create_scalar_function("answer", self._answered, 2)
        db.create_scalar_function("litter", self._found_litter, 0)
        self._thread = Thread(target=self._run, name="gapless-log-writer", daemon=True)
        self._thread.start()

    async def step(self, number: int, rows: list[_Row]) -> int:
        """Hand rows over; the answer to them, `_DONE` without one, once they are durable."""
        done: asyncio.Future[int] = self._loop.create_future()
        self._queue.put(_Job(number, rows, done))
        with self._turns:
            return await done

    def close(self) -> None:
        """Finish what was handed over; blocks until it is."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            jobs: list[_Job] = []
            with suppress(Empty):
                # With litter left it does not wait: it sweeps on, a chunk between any two groups.
                job = self._queue.get(block=not self._litter)
                while job is not None:
                    jobs.append(job)
                    job = self._queue.get_nowait()
                going = False
            if jobs:
                self._commit(jobs)
            if self._litter:
                self._tidy()

    def _commit(self, jobs: list[_Job]) -> None:
        failure: Exception | None = None
        try:
            self._insert([row for job in jobs for row in job.rows])
        except Exception as error:  # whatever it is, those who wait must hear of it
            failure = error
        answers, self._answers = self._answers, {}
        self._loop.call_soon_threadsafe(self._deliver, jobs, answers, failure)

    def _insert(self, rows: list[_Row]) -> None:
        if len(rows) > _CHUNK:
            with _transaction(self.db):
                for at in range(0, len(rows), _CHUNK):
                    self._insert(rows[at : at + _CHUNK])
            return
        # Rows that do nothing fill up to a power of two, so that few statements serve all groups.
        size = 1 << (len(rows) - 1).bit_length()
        rows += [_row()] * (size - len(rows))
        values: list[_Value] = list(chain.from_iterable(rows))
        self.db.execute(_insert(size), values)

    def _deliver(self, jobs: list[_Job], answers: dict[int, int], failure: Exception | None) -> None:
        for job in jobs:
            if job.done.done():  # its caller was cancelled
                continue
            if failure is None:
                job.done.set_result(answers.get(job.number, _DONE))
            else:
                job.done.set_exception(_storage_error(self._path, "written", failure))

    def _answered(self, *answer: Any) -> None:
        number, value = answer
        self._answers[number] = value

    def _found_litter(self, *_: object) -> None:
        self._litter = True

    def _tidy(self) -> None:
        before = self.db.total_changes()
        try:
            with _transaction(self.db):
                self.db.execute(_sql("sweep.sql"))
        except apsw.Error:
            # A full disk, say. It costs nobody anything but space: the next eviction tries again.
            self._litter = False
        else:
            self._litter = self.db.total_changes() - before >= _CHUNK


@dataclass(frozen=True, slots=True)
class _Store:
    """What an open log holds. The reader's connection is used in `thread` only."""

    writer: _Writer
    reader: apsw.Connection
    thread: ThreadPoolExecutor
    turns: _Turns
    tails: Tails

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.writer.db.close()


def _storage_error(path: str, what: str, error: Exception) -> StorageError:
    reason = error.strerror if isinstance(error, OSError) else error
    hint = "check the path and its permissions" if what == "opened" else None
    failure = StorageError(f"the log {path} cannot be {what}: {reason}", hint=hint)
    failure.__cause__ = error
    return failure


@cache
def _sql(name: str) -> str:
    return (files("gapless.log") / "sql" / name).read_text("utf-8")


def _open(path: str, synchronous: str) -> tuple[apsw.Connection, apsw.Connection]:
    """Open the file, or make it; the writer's connection and the reader's."""
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with ExitStack() as stack:
            writer = stack.enter_context(closing(_connect(path)))
            if writer.readonly("main"):  # SQLite opens it all the same, to fail at the first commit
                raise apsw.ReadOnlyError("attempt to write a readonly database")
            _migrate(writer, path)
            writer.pragma("synchronous", synchronous)
            writer.pragma("fullfsync", 1)  # where `fsync` alone leaves it to the disk's cache
            writer.pragma("temp_store", "memory")
            writer.execute(_sql("writer.sql"))
            reader = stack.enter_context(closing(_connect(path)))
            reader.pragma("query_only", 1)
            stack.pop_all()
        return writer, reader
    except (apsw.Error, OSError) as error:
        raise _storage_error(path, "opened", error) from error


def _connect(path: str) -> apsw.Connection:
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
    db.set_busy_timeout(_BUSY_MS)
    return db


@contextmanager
def _transaction(db: apsw.Connection) -> Generator[None]:
    """One transaction. (`with db:` keeps the interpreter to itself while it waits for lock and disk.)"""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # some errors end it by themselves
            db.execute("ROLLBACK")
        raise


def _migrate(db: apsw.Connection, path: str) -> None:
    """Bring an older file, or an empty one, up to `SCHEMA`.

    Raises:
        SchemaError: it is newer or not ours; it has not been touched.
    """
    version = _version(db, path)
    db.pragma("journal_mode", "wal")
    for number in range(version + 1, SCHEMA + 1):
        with _transaction(db):
            if _version(db, path) < number:  # no other process was faster
                db.execute(_sql(f"{number:04}.sql"))
                db.pragma("user_version", number)
                db.pragma("application_id", APPLICATION_ID)


def _version(db: apsw.Connection, path: str) -> int:
    # One statement, so that what it finds is of one moment.
    application, version, tables = db.execute(
        """
        SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
        FROM pragma_application_id, pragma_user_version
        """
    ).get
    if application != APPLICATION_ID:
        if application or version or tables:
            raise SchemaError(f"{path} is the SQLite file of another program")
        return 0
    if version > SCHEMA:
        raise SchemaError(f"{path} is a log of version {version}; this Gapless knows versions up to {SCHEMA}")
    return version


def _load(db: apsw.Connection, key: SessionKey) -> Stored | None:
    row = db.execute(f"{_STORED} WHERE key = ?", (key,)).fetchone()
    return None if row is None else Stored(*row)


def _sessions(db: apsw.Connection) -> tuple[Stored, ...]:
    return tuple(Stored(*row) for row in db.execute(f"{_STORED} WHERE key IS NOT NULL ORDER BY id"))


def _confirm(db: apsw.Connection, key: SessionKey, write: Write) -> None:
    """Tell a write that has landed before from one that conflicts, and raise for the latter."""
    stored = _load(db, key)
    if stored is None or not landed(stored, write, lambda number: _digest(db, key, number)):
        raise conflict(stored, write)


def _read(db: apsw.Connection, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
    # One statement, so that the floor and the segments are of one moment.
    rows = db.execute(
        """
        SELECT session.floor, segment.first, segment.last, segment.data
        FROM session LEFT JOIN segment
            ON segment.session = session.id AND segment.last > ? AND segment.first <= ?
        WHERE session.key = ? ORDER BY segment.last
        """,
        (after, upto, key),
    )
    with closing(rows):
        head = rows.fetchone()
        if head is None:
            return b"", after
        floor, *segment = head
        if after < floor:
            raise BelowFloorError(f"events up to {floor} are evicted: nothing follows {after}")
        if segment[0] is None or upto <= after:
            return b"", after
        return join((Segment(*row[1:]) for row in chain([head], rows)), after, upto, limit)


def _link(db: apsw.Connection, key: SessionKey, seq: int) -> Link | None:
    row = db.execute(
        """
        SELECT session.committed, session.link, session.floor, session.floor_link,
            segment.first, segment.last, segment.data
        FROM session LEFT JOIN segment ON segment.session = session.id AND segment.last >= ?
        WHERE session.key = ? ORDER BY segment.last LIMIT 1
        """,
        (seq, key),
    ).fetchone()
    if row is None:
        return None
    committed, link, floor, floor_link, *segment = row
    if seq == committed:
        return link
    if seq == floor:
        return floor_link
    return Segment(*segment).link(seq) if floor < seq < committed else None


def _digest(db: apsw.Connection, key: SessionKey, number: int) -> Digest | None:
    row = db.execute(
        "SELECT digest FROM session JOIN inbox ON session = session.id WHERE key = ? AND number = ?",
        (key, number),
    ).fetchone()
    return None if row is None else row[0]


def _entries(db: apsw.Connection, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
    rows = db.execute(
        """
        SELECT number, digest, data FROM session JOIN inbox ON session = session.id
        WHERE key = ? AND number > ? ORDER BY number LIMIT ?
        """,
        (key, after, max(limit, 0)),
    )
    return tuple(Entry(*row) for row in rows)
