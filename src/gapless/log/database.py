"""The file of a SQLite log: made, brought up to date, opened, and kept an eye on."""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from importlib.resources import files
from typing import Final

import apsw

from gapless.errors import SchemaError, StorageError

__all__ = [
    "APPLICATION_ID",
    "SCHEMA",
    "Files",
    "open_database",
    "sql",
    "storage_error",
    "transaction",
]

APPLICATION_ID: Final = int.from_bytes(b"Gapl", "big")
"""The `PRAGMA application_id` that marks a file as ours."""

SCHEMA: Final = 2
"""The `PRAGMA user_version` this code reads and writes: the number of the last file in `sql/`."""

_HANDLE: Final[int | None] = getattr(os, "O_PATH", None)
"""Opens a file for nothing but its name. (To close any other handle would drop SQLite's locks.)"""

_BUSY_MS = 5000
"""How long to wait for another process that holds the file locked."""


class _ReplacedError(Exception):
    """What lies at a log's path is not what is open."""

    def __init__(self) -> None:
        super().__init__("it, or a file beside it, was removed or replaced while it was open")


class Files:
    """The file of an open log and the two beside it, which have to stay where they are.

    SQLite would go on writing into a file that has lost its name, and a restart would lack all of it.

    Each commit asks. To `stat` a file has Linux (6.13) give its next write a time of its own, which
    makes that write's sync half as long again; so the kernel is asked for the names that the files
    have now, and only if those are others, or cannot be told, what lies at the paths.
    """

    __slots__ = ("_handles", "_names", "_opened", "_paths")

    def __init__(self, path: str) -> None:
        self._paths = (path, f"{path}-wal", f"{path}-shm")
        self._opened = self._look()
        self._handles: list[int] = []
        self._names = self._told_apart_by_name()

    def check(self) -> None:
        """Make sure that they are the ones that were opened.

        Raises:
            Exception: they are not, or cannot be looked at; `storage_error` has words for it.
        """
        if self._names is not None and self._ask() == self._names:
            return
        if self._look() != self._opened:
            raise _ReplacedError

    def close(self) -> None:
        """Give up what they were watched with."""
        self._names = None
        while self._handles:
            os.close(self._handles.pop())

    def _look(self) -> list[tuple[int, int]] | None:
        try:
            return [(about.st_dev, about.st_ino) for about in map(os.stat, self._paths)]
        except FileNotFoundError:
            return None

    def _told_apart_by_name(self) -> list[str] | None:
        """The files' names, if whoever removes or replaces one changes what the kernel calls it."""
        if _HANDLE is None:
            return None
        try:
            self._handles += [os.open(path, _HANDLE) for path in self._paths]
        except FileNotFoundError:
            return None
        names = self._ask()
        # On the way through a symbolic link another file may come to lie there.
        return names if names == list(map(os.path.abspath, self._paths)) else None

    def _ask(self) -> list[str] | None:
        try:
            return [os.readlink(f"/proc/self/fd/{handle}") for handle in self._handles]
        except OSError:
            return None


def storage_error(path: str, what: str, error: Exception) -> StorageError:
    """Why a log cannot be opened, read or written, in words."""
    reason = error.strerror if isinstance(error, OSError) else error
    hint = "check the path and its permissions" if what == "opened" else None
    if isinstance(error, _ReplacedError):
        hint = "put the files back, or restart the server"
    if isinstance(error, apsw.BusyError):
        hint = "another process is writing to it; if that one stands still, end it"
    failure = StorageError(f"the log {path} cannot be {what}: {reason}", hint=hint)
    failure.__cause__ = error
    return failure


@cache
def sql(name: str) -> str:
    """A file of `sql/`."""
    return (files("gapless.log") / "sql" / name).read_text("utf-8")


def open_database(
    path: str, synchronous: str, vfs: str | None
) -> tuple[apsw.Connection, apsw.Connection, Files]:
    """Open the file, or make it; the writer's connection, the reader's, and what lies where.

    Raises:
        StorageError: it cannot be opened. SchemaError: it is newer or not ours; it was not touched.
    """
    try:
        _refuse_orphan(path)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with ExitStack() as stack:
            writer = stack.enter_context(closing(_connect(path, vfs)))
            if writer.readonly("main"):  # SQLite opens it all the same, to fail at the first commit
                raise apsw.ReadOnlyError("attempt to write a readonly database")
            _migrate(writer, path)
            writer.pragma("synchronous", synchronous)
            writer.pragma("fullfsync", 1)  # where `fsync` alone leaves it to the disk's cache
            writer.pragma("temp_store", "memory")
            writer.execute(sql("writer.sql"))
            reader = stack.enter_context(closing(_connect(path, vfs)))
            reader.pragma("query_only", 1)
            opened = Files(path)
            stack.pop_all()
        return writer, reader, opened
    except (apsw.Error, OSError) as error:
        raise storage_error(path, "opened", error) from error


def _refuse_orphan(path: str) -> None:
    """Refuse to begin anew beside a write-ahead log, which SQLite would delete without a word."""
    with suppress(FileNotFoundError):
        left = os.stat(f"{path}-wal").st_size
        with suppress(FileNotFoundError):
            if os.stat(path).st_size:
                return
        if left:
            raise StorageError(
                f"the log {path} is not there, but {path}-wal is, with what was committed last",
                hint="put the file back beside it, or move the -wal file away to begin anew",
            )


def _connect(path: str, vfs: str | None) -> apsw.Connection:
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
    db.set_busy_timeout(_BUSY_MS)
    return db


@contextmanager
def transaction(db: apsw.Connection) -> Generator[None]:
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
    _write_ahead(db)
    for number in range(version + 1, SCHEMA + 1):
        with transaction(db):
            if _version(db, path) < number:  # no other process was faster
                db.execute(sql(f"{number:04}.sql"))
                db.pragma("user_version", number)
                db.pragma("application_id", APPLICATION_ID)


def _write_ahead(db: apsw.Connection) -> None:
    """Have commits go to a write-ahead log. Where two turn it on at once, SQLite does not wait itself."""
    ends = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            db.pragma("journal_mode", "wal")
            return
        except apsw.BusyError:
            if time.monotonic() >= ends:
                raise
            time.sleep(0.01)


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
