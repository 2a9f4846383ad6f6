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
from typing import Any, Final

import apsw

from gapless.errors import SchemaError, StorageError
from gapless.log import queries
from gapless.log.base import Entry, SessionKey, Stored
from gapless.log.database import APPLICATION_ID, SCHEMA

__all__ = ["STEPS", "Snapshot", "snapshot"]

STEPS: Final = 100_000
"""Steps of SQLite's machine, some milliseconds, between two moments at which it can be interrupted."""

_BUSY_MS = 5000


class Snapshot:
    """What `gapless.torture.audit` reads, each method raising `StorageError` where that cannot be done.

    Attributes:
        orphaned: whether there is no write-ahead log, though its index is there: they come and go together.
    """

    def __init__(self, db: apsw.Connection, file: Path, orphaned: bool) -> None:
        self._db = db
        self._file = file
        self.orphaned = orphaned

    def rows(self, query: str, *values: Any) -> Generator[tuple[Any, ...]]:
        """What a query finds."""
        with _reading(self._file), closing(self._db.execute(query, values)) as rows:
            yield from rows

    async def sessions(self) -> tuple[Stored, ...]:
        """All sessions, oldest first."""
        with _reading(self._file):
            return queries.sessions(self._db)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """The segments that reach above `after`, whole, and the last event in them.

        At least one, and no more once they have `limit` bytes; `(b"", after)` if there is none. An
        event at or below `after` may be among theirs.
        """
        rows = self.rows(
            """
            SELECT segment.last, segment.data FROM segment JOIN session ON session = session.id
            WHERE key = ? AND segment.last > ? AND segment.first <= ? ORDER BY segment.last
            """,
            key,
            after,
            upto,
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
        with _reading(self._file):
            return queries.entries(self._db, key, after, limit)


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
    with _reading(file):
        before = _state(file)
        if at_rest:
            _refuse_truncated(file)
        with closing(apsw.Connection(f"{file.as_uri()}?{how}", flags=flags)) as db:
            db.set_busy_timeout(_BUSY_MS)
            db.set_progress_handler(lambda: False, STEPS)  # so that Ctrl-C ends a long query
            db.execute("BEGIN")
            _check(db, file)
            yield Snapshot(db, file, at_rest and index.exists())
    if at_rest and (log.exists() or _state(file) != before):
        raise StorageError(f"the log {file} was opened by a server while it was read", hint="try again")


@contextmanager
def _reading(file: Path) -> Generator[None]:
    try:
        yield
    except apsw.Error as error:
        raise StorageError(f"the log {file} cannot be read: {error}", hint="") from error


def _state(file: Path) -> tuple[int, int]:
    try:
        about = file.stat()
    except OSError as error:
        raise StorageError(f"the log {file} cannot be read: {error.strerror}", hint="") from None
    return about.st_size, about.st_mtime_ns


def _refuse_truncated(file: Path) -> None:
    """Say so where a file is shorter than its header has it, of which SQLite says that it is malformed."""
    try:
        with file.open("rb") as opened:
            header = opened.read(100)
    except OSError as error:
        raise StorageError(f"the log {file} cannot be read: {error.strerror}", hint="") from None
    if not header.startswith(b"SQLite format 3\0") or header[24:28] != header[92:96]:
        return  # it is none, or its header does not know
    page = int.from_bytes(header[16:18], "big")
    due = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    size = file.stat().st_size
    if size < due:
        raise StorageError(f"the log {file} is truncated: it has {size} bytes of {due}", hint="")


def _check(db: apsw.Connection, file: Path) -> None:
    if db.pragma("application_id") != APPLICATION_ID:
        empty = not db.execute("SELECT count(*) FROM sqlite_schema").get
        hint = "it is empty: is its -wal file missing?" if empty else ""
        raise SchemaError(f"{file} is no log of Gapless", hint=hint)
    version = db.pragma("user_version")
    if version != SCHEMA:
        older = "let gapless sessions list open it once, which brings it up to date"
        raise SchemaError(
            f"{file} is a log of version {version}; this Gapless reads version {SCHEMA}",
            hint=older if version < SCHEMA else None,
        )
