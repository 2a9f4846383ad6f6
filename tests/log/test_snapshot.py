"""A snapshot is one moment of a log, and leaves no trace of having been taken."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from gapless.errors import SchemaError, StorageError
from gapless.log.snapshot import snapshot
from gapless.log.sqlite import SqliteLog
from tests.torture.logged import Written, damage, write_log


async def fill(session: Written) -> None:
    await session.ask(1)
    await session.note(3)
    await session.note(2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return write_log(tmp_path / "here" / "a log?#%.db", fill)


def state(path: Path) -> dict[str, tuple[int, int]]:
    """Every file beside a log: its size and its time."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.parent.iterdir()}


async def test_a_log_at_rest_is_read_and_nothing_is_made_or_changed(path: Path) -> None:
    before = state(path)
    with snapshot(path) as log:
        (stored,) = await log.sessions()
        page, last = await log.read(stored.key, 0, 99, 1 << 20)
        (entry,) = await log.entries(stored.key, 0, 10)
        assert state(path) == before
    assert (last, page.count(b"\n\n"), entry.number) == (5, 5, 1)
    assert state(path) == before
    assert list(before) == [path.name]


async def test_segments_come_whole_in_order_and_no_more_than_asked_for(path: Path) -> None:
    with snapshot(path) as log:
        (stored,) = await log.sessions()
        page, last = await log.read(stored.key, 1, 99, 1)
        assert (last, page[:6]) == (3, b"id: 1.")  # the segment holds it
        page, last = await log.read(stored.key, 3, 99, 1)
        assert (last, page[:6]) == (5, b"id: 4.")
        assert await log.read(stored.key, 5, 99, 1) == (b"", 5)


async def test_a_log_that_is_being_written_is_read_as_it_was_at_one_moment(path: Path) -> None:
    server = SqliteLog(path)
    await server.start()
    session = Written(server, "another", retain_events=4)
    await session.open()
    await session.note(4)
    beside = sorted(file.name for file in path.parent.iterdir())
    with snapshot(path) as log:
        stored = (await log.sessions())[1]
        for _ in range(8):
            await session.note(1)
        assert session.machine.outbox.floor >= 4  # what the snapshot shows is evicted by now
        page, last = await log.read(stored.key, 0, 99, 1 << 20)
        assert (stored.committed, stored.floor, last, page[:6]) == (4, 0, 4, b"id: 1.")
    with snapshot(path) as log:
        assert (await log.sessions())[1].committed == 12
    assert sorted(file.name for file in path.parent.iterdir()) == beside
    await server.close()


async def test_what_a_killed_server_left_is_read(path: Path, tmp_path: Path) -> None:
    server = SqliteLog(path)
    await server.start()
    session = Written(server, "another")
    await session.open()
    shutil.copytree(path.parent, tmp_path / "left", copy_function=shutil.copy)
    await server.close()
    with snapshot(tmp_path / "left" / path.name) as log:
        assert len(await log.sessions()) == 2


async def test_a_copy_that_cannot_be_read_without_writing_is_refused(path: Path) -> None:
    server = SqliteLog(path)
    await server.start()
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.with_name("copy.db-wal").touch()
    await server.close()
    before = state(path)
    with pytest.raises(StorageError, match=r"copy.db-wal was copied without copy.db-shm"), snapshot(copy):
        pass
    assert state(path) == before


def test_a_log_that_somebody_opens_while_it_is_read_at_rest_is_not_trusted(path: Path) -> None:
    with pytest.raises(StorageError, match="was opened by a server while it was read"), snapshot(path):
        asyncio.run(touch(path))


async def touch(path: Path) -> None:
    server = SqliteLog(path)
    await server.start()
    await Written(server, "another").open()
    await server.close()


def test_no_file_is_made_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"), snapshot(tmp_path / "none.db"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_what_is_no_log_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(content)
    with (
        pytest.raises((SchemaError, StorageError), match=r"is no log of Gapless|not a database"),
        snapshot(path),
    ):
        pass
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["other.db"]


def test_a_log_of_another_version_is_refused(path: Path) -> None:
    db = apsw.Connection(str(path))
    db.pragma("user_version", 3)
    db.close()
    with pytest.raises(SchemaError, match="version 3"), snapshot(path):
        pass


def test_a_log_whose_tables_are_gone_is_a_storage_error(path: Path) -> None:
    damage(path, "DELETE FROM segment")
    db = apsw.Connection(str(path))
    db.execute("DROP TABLE session")
    db.close()
    with pytest.raises(StorageError, match="no such table"), snapshot(path) as log:
        asyncio.run(log.sessions())


def spoil(path: Path, page: int) -> None:
    """Make a page of a file into none."""
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("table", ["session", "segment", "inbox"])
async def test_what_is_damaged_is_a_storage_error_there_and_then_and_what_is_not_is_read(
    path: Path, table: str
) -> None:
    with snapshot(path) as log:
        (stored,) = await log.sessions()
        ((page,),) = log.rows("SELECT rootpage FROM sqlite_schema WHERE name = ?", table)
    spoil(path, page)
    with snapshot(path) as log:
        reads = {
            "session": log.sessions,
            "segment": lambda: log.read(stored.key, 0, 99, 1),
            "inbox": lambda: log.entries(stored.key, 0, 10),
        }
        with pytest.raises(StorageError, match="cannot be read: database disk image is malformed"):
            await reads.pop(table)()
        if table != "session":
            assert len([await read() for read in reads.values()]) == 2


@pytest.mark.parametrize("size", [4096, 5000, 99])
def test_a_truncated_log_is_said_to_be_truncated(path: Path, size: int) -> None:
    whole = path.stat().st_size
    os.truncate(path, size)
    with pytest.raises(StorageError, match=f"is truncated: it has {size} bytes of {whole}"), snapshot(path):
        pass


async def test_a_young_log_without_its_write_ahead_log_is_said_to_be_empty(tmp_path: Path) -> None:
    server = SqliteLog(tmp_path / "log.db")
    await server.start()
    await Written(server).open()
    shutil.copy(tmp_path / "log.db", tmp_path / "copy.db")
    await server.close()
    with pytest.raises(SchemaError) as refused, snapshot(tmp_path / "copy.db"):
        pass
    assert refused.value.line.endswith("no log of Gapless (it is empty: is its -wal file missing?)")


def test_an_older_log_is_refused_with_a_word_on_how_it_becomes_a_newer_one(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("user_version", 1)
    with pytest.raises(SchemaError) as refused, snapshot(path):
        pass
    assert "brings it up to date" in refused.value.hint
