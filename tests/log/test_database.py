"""The file of a log: what becomes one, what is brought up to date, and what is refused and left alone."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from gapless.errors import SchemaError, StorageError
from gapless.log import database
from gapless.log.base import Entry, Run, Stored
from gapless.log.database import APPLICATION_ID, SCHEMA, sql
from gapless.log.sqlite import SqliteLog
from tests.log.disk import mounted
from tests.log.written import DIGEST, GRAIN, PLENTY, A, B, blocks, key, link, opened, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "log.db"


def put(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- Files ----------------------------------------------------------------------------------


async def test_a_new_file_is_its_owners_alone(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        made = sorted(file.name for file in path.parent.iterdir())
        assert made == ["log.db", "log.db-shm", "log.db-wal"]
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}


async def test_an_existing_file_keeps_its_mode(path: Path) -> None:
    put(path, b"", 0o640)
    async with opened(path):
        assert mode(path) == 0o640


async def test_an_empty_file_becomes_a_log_of_the_current_version(path: Path) -> None:
    put(path, b"")
    async with opened(path) as log:
        await log.create(A, b"", link(0))
    with closing(apsw.Connection(str(path))) as db:
        assert db.pragma("user_version") == SCHEMA
        assert db.pragma("application_id") == APPLICATION_ID == 0x4761706C
        assert db.pragma("journal_mode") == "wal"


# --- An older version -----------------------------------------------------------------------


def version_1(path: Path) -> None:
    """A log as version 1 left it, with something of everything in it."""
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("journal_mode", "wal")
        db.execute(sql("0001.sql"))
        db.pragma("user_version", 1)
        db.pragma("application_id", APPLICATION_ID)
        session = "INSERT INTO session VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        db.execute(session, (1, A, b"state", 5, link(5), 1, link(1), 2, 1, 3, 1000, 2000))
        db.execute(session, (2, None, b"", 1, link(1), 1, link(1), 0, 0, 0, 1000, 2000))
        db.execute(session, (3, B, b"new", 0, link(0), 0, link(0), 0, 0, 0, 1500, 1500))
        for at, (first, last) in enumerate([(1, 1), (2, 3), (4, 5)], 1):
            db.execute("INSERT INTO segment VALUES (?, 1, ?, ?, ?)", (at, first, last, blocks(first, last)))
        db.execute("INSERT INTO segment VALUES (9, 2, 1, 1, ?)", (blocks(1, 1),))
        for number in (1, 2):
            db.execute("INSERT INTO inbox VALUES (?, 1, ?, ?, x'')", (number, number, DIGEST))


async def has_all_of_version_1(path: Path) -> None:
    async with opened(path) as log:
        assert await log.sessions() == (
            Stored(A, b"state", 5, link(5), 1, link(1), 2, 1, 3, 1000, 2000, owner=None),
            Stored(B, b"new", 0, link(0), 0, link(0), 0, 0, 0, 1500, 1500, owner=None),
        )
        assert await log.read(A, 1, 9, PLENTY) == (blocks(2, 5), 5)
        assert await log.entries(A, 0, 9) == (Entry(1, DIGEST, b""), Entry(2, DIGEST, b""))
        # When they were written is not known: no later than the session was.
        run = Run(5, link(5), 4, len(blocks(2, 5)), 2000, {0: (5, link(5))})
        assert await log.runs(A, GRAIN) == (run,)


def version(path: Path) -> int:
    """The version of a file, which has all that belongs to it and nothing of the next."""
    with closing(apsw.Connection(str(path))) as db:
        found: int = db.pragma("user_version")
        tables = set(db.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'").get)
        columns = {
            table: [row[0] for row in db.execute("SELECT name FROM pragma_table_info(?)", (table,))]
            for table in ("session", "segment")
        }
        whole = db.pragma("integrity_check")
    assert whole == "ok"
    new = (
        "owner" in tables,
        "session_owner" in tables,
        "owner" in columns["session"],
        "at" in columns["segment"],
    )
    assert new == (found == 2,) * 4
    return found


def test_migrations_are_numbered_up_to_the_current_version() -> None:
    folder = Path(database.__file__).parent / "sql"
    numbered = sorted(file.name for file in folder.glob("[0-9]*.sql"))
    assert numbered == [f"{number:04}.sql" for number in range(1, SCHEMA + 1)]


async def test_a_log_of_version_1_is_brought_up_to_date_with_all_that_is_in_it(path: Path) -> None:
    version_1(path)
    assert version(path) == 1
    await has_all_of_version_1(path)
    assert version(path) == 2
    async with opened(path, clock=lambda: 3000.0) as log:
        await log.commit(A, write(6, 6, fence=3))
        assert [(run.last, run.at) for run in await log.runs(A, GRAIN)] == [(6, 3000)]
        assert await log.acquire(A, 3, await log.join("")) == 4


@pytest.mark.parametrize("old", [False, True], ids=["new", "version 1"])
async def test_logs_that_migrate_the_same_file_at_once_do_not_get_in_each_others_way(
    path: Path, old: bool
) -> None:
    if old:
        version_1(path)
    logs = [SqliteLog(path) for _ in range(4)]
    await asyncio.gather(*(log.start() for log in logs))
    await asyncio.gather(*(log.create(key(str(at)), b"", link(0)) for at, log in enumerate(logs)))
    assert len(await logs[0].sessions()) == 4 + 2 * old
    for log in logs:
        await log.close()


async def test_a_new_file_that_another_process_is_just_making_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(apsw.Connection(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            if seconds < 0.001:
                return  # the loop, which stands aside for the log's threads
            waits.append(seconds)
            if len(waits) == 3:
                other.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", sleep)
        log = SqliteLog(path)
        await log.start()
        assert await log.sessions() == ()
        await log.close()
    assert len(waits) == 3


async def test_a_file_that_stays_locked_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 50)
    with closing(apsw.Connection(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="cannot be opened: database is locked"):
            await SqliteLog(path).start()


OPEN = """
import asyncio, sys
from gapless.log.sqlite import SqliteLog
async def main():
    log = SqliteLog(sys.argv[1])
    await log.start()
    print(len(await log.sessions()))
    await log.close()
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


def test_processes_that_migrate_the_same_file_at_once_migrate_it_once(path: Path) -> None:
    version_1(path)
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN, path], text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate() for process in processes] == [("2\n", "")] * 3
    asyncio.run(has_all_of_version_1(path))


async def test_a_process_that_dies_while_it_migrates_leaves_one_version_or_the_other(path: Path) -> None:
    version_1(path)
    left: list[Path] = []

    def die(what: str, _: str) -> None:
        if what != "read":
            left.append(shutil.copytree(path.parent, path.parent.with_name(f"left {len(left)}")))

    with mounted() as disk:
        disk.before = die
        async with opened(path, vfs=disk.name):
            disk.before = lambda what, path: None
    found = [version(copy / path.name) for copy in left]
    assert found == sorted(found)
    assert set(found) == {1, 2}
    for copy in left:
        await has_all_of_version_1(copy / path.name)


class Stopped(Exception):
    pass


def test_a_migration_that_fails_at_any_statement_leaves_one_version_or_the_other(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_1(path)
    connect, left, found = database._connect, 0, list[int]()

    def trace(*_: object) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped
        return True

    def traced(path: str, vfs: str | None) -> apsw.Connection:
        db = connect(path, vfs)
        db.exec_trace = trace
        return db

    monkeypatch.setattr(database, "_connect", traced)
    while left < 1:
        copy = Path(shutil.copy(path, tmp_path / f"{len(found)}.db"))
        left = len(found)
        with suppress(Stopped):
            writer, reader, _ = database.open_database(str(copy), "full", None)
            reader.close()
            writer.close()
        found.append(version(copy))
        before, left = left, PLENTY
        asyncio.run(has_all_of_version_1(copy))
        left = before
    assert found == sorted(found)
    assert set(found) == {1, 2}


# --- What is refused ------------------------------------------------------------------------


@contextmanager
def untouched(path: Path) -> Iterator[None]:
    before = path.read_bytes()
    yield
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


async def test_a_newer_log_is_refused_and_left_alone(path: Path) -> None:
    async with opened(path):
        pass
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("user_version", SCHEMA + 1)
    with (
        untouched(path),
        pytest.raises(SchemaError, match=rf"version {SCHEMA + 1}; .* up to {SCHEMA}") as caught,
    ):
        await SqliteLog(path).start()
    assert "\n" not in caught.value.line
    assert str(path) in caught.value.line


@pytest.mark.parametrize(
    "mark", ["PRAGMA application_id = 7", "PRAGMA user_version = 1", "CREATE TABLE theirs (x)"]
)
async def test_another_programs_file_is_refused_and_left_alone(path: Path, mark: str) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute(mark)
    with untouched(path), pytest.raises(SchemaError, match="another program"):
        await SqliteLog(path).start()


async def test_a_file_that_is_no_database_cannot_be_opened(path: Path) -> None:
    put(path, b"Dear diary, " * 100)
    with untouched(path), pytest.raises(StorageError, match=r"log\.db cannot be opened: .*not a database"):
        await SqliteLog(path).start()


@pytest.mark.parametrize("missing", [True, False])
async def test_a_file_cannot_be_made_where_there_is_no_directory(tmp_path: Path, missing: bool) -> None:
    directory = tmp_path / "directory"
    if not missing:
        directory.touch()
    log = SqliteLog(directory / "log.db")
    with pytest.raises(StorageError, match=r"log\.db cannot be opened: .*directory"):
        await log.start()
    await log.close()


async def test_a_file_cannot_be_made_in_a_directory_one_may_not_write(path: Path) -> None:
    path.parent.chmod(0o500)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root writes anywhere
    try:
        with pytest.raises(StorageError, match=r"log\.db cannot be opened: .*[Pp]ermission"):
            await SqliteLog(path).start()
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        path.parent.chmod(0o700)


async def test_a_file_one_may_only_read_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path):
        pass
    # What SQLite falls back to where permissions leave it no choice; they leave root every choice.
    monkeypatch.setattr(apsw, "SQLITE_OPEN_READWRITE", apsw.SQLITE_OPEN_READONLY)
    with untouched(path), pytest.raises(StorageError, match=r"log\.db cannot be opened: .*readonly"):
        await SqliteLog(path).start()


# --- A file that goes away ------------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


GONE = r"log\.db cannot be written: .* was removed or replaced .*restart the server"


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("happen", [remove, replace])
async def test_nobody_is_told_of_a_commit_into_a_file_that_was_removed_or_replaced(
    path: Path, suffix: str, happen: Callable[[Path], None]
) -> None:
    async with opened(path) as log:
        owner = await log.join("")
        for name in (A, B):
            await log.create(name, b"", link(0))
        happen(path.with_name(path.name + suffix))
        steps = [
            log.commit(A, write(1, 1)),
            log.commit(B, write(1, 1)),
            log.create(key("c"), b"", link(0)),
            log.acquire(A, 0, owner),
            log.join(""),
            log.beat(owner),
            log.remove(B),
        ]
        for outcome in await asyncio.gather(*steps, return_exceptions=True):
            assert isinstance(outcome, StorageError)
            assert "(put the files back, or restart the server)" in outcome.line
            assert re.search(GONE, outcome.line)
        with pytest.raises(StorageError, match="removed or replaced"):
            await log.commit(A, write(1, 1))  # and not told that it has landed


async def test_a_commit_looks_at_no_file_whose_name_tells_enough(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    stat = os.stat

    def noted(path: Any, **how: Any) -> os.stat_result:
        looked.append(path)
        return stat(path, **how)

    async with opened(path) as log:
        await log.create(A, b"", link(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", noted)
            await log.commit(A, write(1, 1))
    assert len(looked) == (0 if hasattr(os, "O_PATH") else 3)


async def test_a_log_behind_a_symbolic_link_that_leads_elsewhere_by_now_is_replaced(path: Path) -> None:
    there, other, way = (path.with_name(name) for name in ("there", "other", "way"))
    there.mkdir()
    other.mkdir()
    way.symlink_to(there)
    async with opened(way / "log.db") as log:
        await log.create(A, b"", link(0))
        way.unlink()
        way.symlink_to(other)
        with pytest.raises(StorageError, match="removed or replaced"):
            await log.commit(A, write(1, 1))


async def test_a_log_that_is_closed_leaves_nothing_open(path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    async with opened(path) as log:
        await log.create(A, b"", link(0))
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_what_was_told_before_a_file_beside_it_was_removed_is_there_after_a_restart(
    path: Path, suffix: str
) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        await log.commit(A, write(1, 1))
        os.unlink(f"{path}{suffix}")
        with pytest.raises(StorageError, match="removed or replaced"):
            await log.commit(A, write(2, 2))
    async with opened(path) as log:
        assert (await log.read(A, 0, 1, PLENTY)) == (blocks(1, 1), 1)


async def test_a_commit_into_a_file_that_was_moved_away_is_recognised_once_it_is_back(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        os.rename(path, f"{path} away")
        with pytest.raises(StorageError, match="removed or replaced"):
            await log.commit(A, write(1, 1))
        os.rename(f"{path} away", path)
        await log.commit(A, write(1, 1))
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 1), 1)


async def test_another_process_that_comes_and_goes_takes_no_file_with_it(path: Path) -> None:
    async with opened(path) as log:
        for number in range(3):
            async with opened(path) as other:
                await other.create(key(str(number)), b"", link(0))
            await log.beat(await log.join(""))


async def test_a_log_whose_files_were_replaced_leaves_its_successors_alone_when_it_closes(path: Path) -> None:
    old = SqliteLog(path)
    await old.start()
    os.rename(path.parent, path.parent.with_name("away"))
    os.mkdir(path.parent)
    async with opened(path) as new:
        await new.create(A, b"", link(0))
        await old.close()
        await new.commit(A, write(1, 1))
        shutil.copytree(path.parent, path.parent.with_name("left"))
    async with opened(path.parent.with_name("left") / path.name) as log:
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 1), 1)


async def test_what_a_killed_process_left_beside_its_file_is_recovered(path: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        await log.commit(A, write(1, 3, entries=(Entry(1, DIGEST, b"one"),)))
        await log.join("address")
        for name in ("log.db", "log.db-wal"):
            shutil.copy(path.with_name(name), left / name)
        before = await log.sessions(), await log.owners()
    assert (left / "log.db-wal").stat().st_size > 0
    async with opened(left / "log.db") as log:
        assert (await log.sessions(), await log.owners()) == before
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 3), 3)
        assert await log.entries(A, 0, 9) == (Entry(1, DIGEST, b"one"),)


@pytest.mark.parametrize("empty", [False, True])
async def test_a_file_that_is_gone_is_not_begun_anew_beside_what_was_committed_last(
    path: Path, tmp_path: Path, empty: bool
) -> None:
    beside = path.with_name("log.db-wal")
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        shutil.copytree(path.parent, tmp_path / "left")
    os.unlink(path)
    if empty:
        put(path, b"")
    shutil.copy(tmp_path / "left" / "log.db-wal", beside)
    before = sorted(os.listdir(path.parent)), beside.read_bytes()
    with pytest.raises(StorageError, match=r"log\.db-wal .* committed last") as caught:
        await SqliteLog(path).start()
    assert "put the file back" in caught.value.line
    assert (sorted(os.listdir(path.parent)), beside.read_bytes()) == before
    shutil.copy(tmp_path / "left" / "log.db", path)
    async with opened(path) as log:
        assert await log.load(A) is not None


async def test_an_empty_wal_file_is_nothing_to_be_afraid_of(path: Path) -> None:
    put(path.with_name("log.db-wal"), b"")
    async with opened(path) as log:
        await log.create(A, b"", link(0))
