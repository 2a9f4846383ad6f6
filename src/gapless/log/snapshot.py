"""One moment of a SQLite log, read as it lies in its file, and nothing written anywhere.

`SqliteLog` needs a file that it may write to. What judges a log must leave it as it is, and must see
what is wrong with it: events come as they are stored, segment by segment, without being searched.
"""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw

from gapless.errors import SchemaError, StorageError
from gapless.log.base import Entry, SessionKey, Stored
from gapless.log.sqlite import APPLICATION_ID, SCHEMA

__all__ = ["Snapshot", "snapshot"]

_BUSY_MS = 5000


class Snapshot:
    """What `gapless.torture.audit` reads."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    async def sessions(self) -> tuple[Stored, ...]:
        """All sessions, oldest first."""
        rows = self._db.execute(
            """
            SELECT key, record, committed, link, floor, floor_link, received, dispatched, fence,
                created, updated
            FROM session WHERE key IS NOT NULL ORDER BY id
            """
        )
        return tuple(Stored(*row) for row in rows)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """The segments that reach above `after`, whole, and the last event in them.

        At least one, and no more once they have `limit` bytes; `(b"", after)` if there is none. An
        event at or below `after` may be among theirs.
        """
        rows = self._db.execute(
            """
            SELECT segment.last, segment.data FROM segment JOIN session ON session = session.id
            WHERE key = ? AND segment.last > ? AND segment.first <= ? ORDER BY segment.last
            """,
            (key, after, upto),
        )
        page = bytearray()
        with closing(rows):
            for last, data in rows:
                page += data
                after = last
                if len(page) >= limit:
                    break
        return bytes(page), after

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        """Inbox messages with a number above `after`, in order, at most `limit` of them."""
        rows = self._db.execute(
            """
            SELECT number, digest, data FROM inbox JOIN session ON session = session.id
            WHERE key = ? AND number > ? ORDER BY number LIMIT ?
            """,
            (key, after, limit),
        )
        return tuple(Entry(*row) for row in rows)


@contextmanager
def snapshot(path: str | os.PathLike[str]) -> Generator[Snapshot]:
    """The log in a file, at the moment it is entered; a server may go on writing to it.

    No file is made, nor one beside it. While it is held, SQLite cannot start its write-ahead log
    anew, which grows by what is written meanwhile.

    Raises:
        StorageError: it cannot be read, or was opened by somebody while it was.
        SchemaError: it is not a log, or of another version.
    """
    file = Path(path).absolute()
    log, index = (file.with_name(file.name + more) for more in ("-wal", "-shm"))
    at_rest = not log.exists()
    if not at_rest and not index.exists():
        raise StorageError(
            f"{log} was copied without {index.name}, and cannot be read without writing",
            hint="copy all three files, or let gapless sessions list open the copy once",
        )
    # At rest it is read as it is: SQLite would make the two files beside it, and leave them there.
    how = "immutable=1" if at_rest else "mode=ro"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    try:
        before = _state(file)
        with closing(apsw.Connection(f"{file.as_uri()}?{how}", flags=flags)) as db:
            db.set_busy_timeout(_BUSY_MS)
            db.execute("BEGIN")
            _check(db, file)
            yield Snapshot(db)
    except apsw.Error as error:
        raise StorageError(f"the log {file} cannot be read: {error}", hint="") from error
    if at_rest and (log.exists() or _state(file) != before):
        raise StorageError(f"the log {file} was opened by a server while it was read", hint="try again")


def _state(file: Path) -> tuple[int, int]:
    try:
        about = file.stat()
    except OSError as error:
        raise StorageError(f"the log {file} cannot be read: {error.strerror}", hint="") from None
    return about.st_size, about.st_mtime_ns


def _check(db: apsw.Connection, file: Path) -> None:
    if db.pragma("application_id") != APPLICATION_ID:
        raise SchemaError(f"{file} is no log of Gapless", hint="")
    version = db.pragma("user_version")
    if version != SCHEMA:
        raise SchemaError(f"{file} is a log of version {version}; this Gapless reads version {SCHEMA}")
