"""A SQLite log looked after: what in its file does not fit the rest, and its unused space given back."""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import apsw

from gapless.errors import StorageError, UsageError
from gapless.log import queries
from gapless.log.base import SessionKey, Stored
from gapless.log.database import sql, storage_error, transaction
from gapless.log.snapshot import STEPS, Snapshot, snapshot

__all__ = ["Compacted", "Fault", "compact", "integrity", "misfits", "size_of", "strays"]

_MOST: Final = 20
"""Lines of SQLite's own check; the first ones say where to look."""
_BUSY_MS: Final = 1000
"""How long to wait for somebody who looks into the file for a moment."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in a log's file that does not fit the rest. `session` is `None` where it is no one's."""

    session: SessionKey | None
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Compacted:
    """What became of a log: its sizes in bytes before and after, and the sessions that were removed."""

    before: int
    after: int
    removed: int


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes that a log takes, those included that lie in its write-ahead log still."""
    size = os.stat(path).st_size
    with suppress(FileNotFoundError):
        size += os.stat(f"{os.fspath(path)}-wal").st_size
    return size


def integrity(log: Snapshot, *, quick: bool) -> Iterator[Fault]:
    """What SQLite finds wrong with the file; `quick` leaves out whether indexes agree with their tables."""
    check = "quick_check" if quick else "integrity_check"
    try:
        for (text,) in log.rows(f"PRAGMA {check}({_MOST})"):
            for line in str(text).splitlines():
                if line != "ok" and not line.startswith("***"):
                    yield Fault(None, "the file", line)
    except StorageError as error:  # damaged where the check itself needs it
        yield Fault(None, "the file", str(error.__cause__))


def strays(log: Snapshot) -> Iterator[Fault]:
    """What belongs to no session, owners that cannot be, and whether a file is missing.

    Raises:
        StorageError: it cannot be read.
    """
    if log.orphaned:
        yield Fault(
            None, "the -wal file", "missing beside its -shm file: what was committed last may be lost"
        )
    for table in ("segment", "inbox"):
        query = (
            f"SELECT session, count(*) FROM {table} WHERE session NOT IN (SELECT id FROM session) GROUP BY 1"
        )
        for id, count in log.rows(query):
            yield Fault(None, f"table {table}", f"rows of session {id}, which is not there ({count})")
    given = "coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'owner'), 0)"
    for (id,) in log.rows(
        f"SELECT id FROM owner WHERE id NOT BETWEEN 1 AND {given} OR beat < 0 OR losses < 0"
    ):
        yield Fault(None, f"owner {id}", "has numbers that cannot be")
    for key, id in log.rows(f"SELECT key, owner FROM session WHERE owner NOT BETWEEN 1 AND {given}"):
        yield Fault(key, f"owner {id}", "owns the session, and was never registered")


def misfits(log: Snapshot, stored: Stored) -> Iterator[Fault]:
    """What in a session's row contradicts itself or the segments' rows; no event is read.

    Raises:
        StorageError: it cannot be read.
    """
    key, floor, committed = stored.key, stored.floor, stored.committed
    if stored.dispatched > stored.received:
        where = _name("message", stored.received + 1, stored.dispatched)
        yield Fault(key, where, "noted as dispatched, and not as received")
    at, fresh = floor, True
    rows = log.rows(
        """
        SELECT first, last FROM segment JOIN session ON session = session.id
        WHERE key = ? AND last > floor ORDER BY last
        """,
        key,
    )
    for first, last in rows:
        if first > at + 1:
            yield Fault(key, _name("event", at + 1, first - 1), "in no segment")
        elif first <= at and not fresh:  # only the first of them may reach below the floor
            yield Fault(key, _name("event", first, at), "in more than one segment")
        at, fresh = last, False
    if at < committed:
        yield Fault(key, _name("event", at + 1, committed), "in no segment")
    elif at > committed:
        yield Fault(key, _name("event", committed + 1, at), "above what is committed")


def compact(path: str, gone: Callable[[Stored], bool], *, vfs: str | None = None) -> Compacted:
    """Remove sessions that are `gone` and what waits to be swept, and write the file anew without them.

    Nobody else may have the log open, and nobody can open it meanwhile. It takes as much space as what
    is left has, twice: beside the log, and in SQLite's directory for temporary files.

    Args:
        vfs: the registered SQLite VFS to write through, if not the usual one.

    Raises:
        UsageError: somebody else has it open; nothing was changed.
        StorageError: it is damaged, and nothing was changed; or there is no room: it is whole, and
            sessions may be removed already. SchemaError: it is not a log, or of another version.
    """
    file = os.path.abspath(path)
    with snapshot(file):
        before = size_of(file)
    try:
        with closing(apsw.Connection(file, flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)) as db:
            db.set_progress_handler(lambda: False, STEPS)
            db.set_busy_timeout(_BUSY_MS)
            # Every connection to a file in WAL mode holds a lock for as long as it is open, a
            # server's too. So this fails while there is one, whatever has become of its owner's row.
            # (It comes first: only before the file is looked at does it keep the index in memory.)
            db.pragma("locking_mode", "exclusive")
            with transaction(db), suppress(FileNotFoundError):
                os.unlink(f"{file}-shm")  # a killed server's
            _refuse_damaged(db, file)
            db.pragma("synchronous", "full")
            db.pragma("fullfsync", 1)
            with transaction(db):
                removed = [(stored.key,) for stored in queries.sessions(db) if gone(stored)]
                db.executemany(
                    "UPDATE session SET key = NULL, record = x'', floor = committed WHERE key = ?", removed
                )
                while _changes(db, sql("sweep.sql")):
                    pass
            db.execute("VACUUM")
            db.pragma("wal_checkpoint", "truncate")
    except apsw.BusyError:
        raise UsageError(f"the log {file} is in use", hint="stop the server, or whatever reads it") from None
    except apsw.FullError as error:
        raise StorageError(
            f"there is no room to compact the log {file}, which is whole",
            hint="it is written anew before the old one goes: make room for that beside it, "
            "and as much again where SQLITE_TMPDIR says",
        ) from error
    except apsw.Error as error:
        raise storage_error(file, "compacted", error) from error
    return Compacted(before, size_of(file), len(removed))


def _refuse_damaged(db: apsw.Connection, file: str) -> None:
    """Of what is damaged, what cannot be read would not be copied."""
    try:
        sound = db.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)]
    except apsw.CorruptError:
        sound = False
    if not sound:
        raise StorageError(
            f"the log {file} is damaged; nothing was changed", hint="gapless log check says where"
        )


def _changes(db: apsw.Connection, statements: str) -> int:
    before = db.total_changes()
    db.execute(statements)
    return db.total_changes() - before


def _name(unit: str, first: int, last: int) -> str:
    return f"{unit} {first}" if first == last else f"{unit}s {first} to {last}"
