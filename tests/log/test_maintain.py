"""What does not fit in a log's file is named, and compacting one loses nothing that anybody can ask for."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from gapless.errors import SchemaError, StorageError, UsageError
from gapless.log.base import OwnerId, SessionKey, Stored
from gapless.log.maintain import compact, integrity, misfits, size_of, strays
from gapless.log.snapshot import snapshot
from gapless.log.sqlite import SqliteLog
from tests.log.disk import mounted
from tests.torture.logged import Written, damage, write_log

PAGE = 4096


async def fill(session: Written) -> None:
    """Six events in three segments, two messages."""
    await session.ask(1, 2)
    await session.note(3)
    await session.answer(1)
    await session.note(2)


async def fill_more(session: Written) -> None:
    for _ in range(20):
        await session.note(2, size=3000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return write_log(tmp_path / "here" / "log.db", fill, fill_more)


def flip(path: Path, at: int) -> None:
    """Change a byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def root(path: Path, name: str) -> int:
    """Where in the file the first page of a table or an index begins."""
    with snapshot(path) as log:
        ((number,),) = log.rows("SELECT rootpage FROM sqlite_schema WHERE name = ?", name)
    return (number - 1) * PAGE


def faults(path: Path, *, quick: bool = False) -> list[tuple[str, str]]:
    """What is wrong with the file and with what is in it."""
    with snapshot(path) as log:
        found = [*integrity(log, quick=quick), *strays(log)]
        for stored in asyncio.run(log.sessions()):
            found += misfits(log, stored)
    return [(fault.where, fault.what) for fault in found]


def held(path: Path) -> dict[SessionKey, tuple[Any, ...]]:
    """All that a log has of its sessions."""

    async def read() -> dict[SessionKey, tuple[Any, ...]]:
        return {
            stored.key: (
                stored,
                await log.read(stored.key, stored.floor, 10**6, 10**9),
                await log.entries(stored.key, 0, 10**6),
            )
            for stored in await log.sessions()
        }

    with snapshot(path) as log:
        return asyncio.run(read())


# What does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_a_sound_log_has_no_fault(path: Path, quick: bool) -> None:
    assert faults(path, quick=quick) == []


def test_an_index_that_disagrees_with_its_table_is_found_unless_it_is_to_be_quick(path: Path) -> None:
    flip(path, root(path, "inbox_order") + PAGE - 1)
    assert {where for where, _ in faults(path)} == {"the file"}
    assert faults(path, quick=True) == []


@pytest.mark.parametrize("table", ["segment", "owner"])
def test_a_page_that_is_none_is_said_in_sqlites_words_line_by_line(path: Path, table: str) -> None:
    flip(path, root(path, table))
    with snapshot(path) as log:
        found = [*integrity(log, quick=True)]
    assert any("btreeInitPage() returns error code 11" in fault.what for fault in found)
    assert all("\n" not in fault.what and "***" not in fault.what for fault in found)


def test_a_file_that_the_check_itself_cannot_get_through_has_a_fault(path: Path) -> None:
    flip(path, path.read_bytes().index(b"CREATE TABLE inbox"))
    with snapshot(path) as log:
        (fault,) = integrity(log, quick=False)
    assert "malformed database schema" in fault.what


def test_rows_of_no_session_are_found(path: Path) -> None:
    damage(path, "DELETE FROM session WHERE id = 1")
    assert faults(path) == [
        ("table segment", "rows of session 1, which is not there (3)"),
        ("table inbox", "rows of session 1, which is not there (2)"),
    ]


def test_rows_of_a_removed_session_that_wait_to_be_swept_are_no_fault(path: Path) -> None:
    damage(path, "UPDATE session SET key = NULL, record = x'', floor = committed WHERE id = 1")
    assert faults(path) == []


def test_an_owner_with_impossible_numbers_and_one_that_never_was_are_found(path: Path) -> None:
    damage(path, "INSERT INTO owner (address, beat) VALUES ('a', -1), ('b', 0)")
    damage(path, "UPDATE session SET owner = 2 + id")  # 3 and 4, of which there is neither
    damage(path, "DELETE FROM owner WHERE id = 2")  # one that has left is no fault
    assert faults(path) == [
        ("owner 1", "has numbers that cannot be"),
        ("owner 3", "owns the session, and was never registered"),
        ("owner 4", "owns the session, and was never registered"),
    ]
    damage(path, "UPDATE session SET owner = 2")
    damage(path, "UPDATE owner SET beat = 0")
    assert faults(path) == []


async def test_owners_that_serve_are_no_fault(path: Path) -> None:
    log = SqliteLog(path)
    await log.start()
    (stored, _) = await log.sessions()
    owner = await log.join("somewhere")
    await log.acquire(stored.key, stored.fence, owner)
    assert owner == OwnerId(1)
    with snapshot(path) as source:
        assert [*strays(source)] == []
    await log.close()


def test_an_index_of_a_write_ahead_log_without_the_log_is_found(path: Path) -> None:
    path.with_name("log.db-shm").touch()
    assert [where for where, _ in faults(path)] == ["the -wal file"]


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        (
            "UPDATE session SET dispatched = 4",
            ("messages 3 to 4", "noted as dispatched, and not as received"),
        ),
        ("DELETE FROM segment WHERE last = 3", ("events 1 to 3", "in no segment")),
        ("DELETE FROM segment WHERE last = 4", ("event 4", "in no segment")),
        ("DELETE FROM segment WHERE last = 6", ("events 5 to 6", "in no segment")),
        ("UPDATE segment SET first = 2 WHERE last = 3", ("event 1", "in no segment")),
        ("UPDATE segment SET first = 6 WHERE last = 6", ("event 5", "in no segment")),
        ("UPDATE segment SET first = 3 WHERE last = 4", ("event 3", "in more than one segment")),
        ("UPDATE segment SET last = 5 WHERE last = 6", ("event 6", "in no segment")),
        ("UPDATE session SET committed = 5", ("event 6", "above what is committed")),
        ("UPDATE session SET floor = 9", ("events 7 to 9", "above what is committed")),
    ],
)
def test_what_a_sessions_row_and_its_segments_contradict_is_found(
    path: Path, sql: str, found: tuple[str, str]
) -> None:
    more = "session = 1" if "segment" in sql else "id = 1"
    damage(path, f"{sql} {'AND' if 'WHERE' in sql else 'WHERE'} {more}")
    assert faults(path) == [found]


def test_segments_below_the_floor_that_wait_to_be_swept_are_no_fault(path: Path) -> None:
    damage(path, "UPDATE session SET floor = 5 WHERE id = 1")  # within the last segment
    assert faults(path) == []
    damage(path, "DELETE FROM segment WHERE session = 1 AND last = 3")
    assert faults(path) == []


# Compacting ------------------------------------------------------------------------------------------


def second(stored: Stored) -> bool:
    """Whether it is the larger one of the two sessions."""
    return stored.committed == 40


def test_what_is_gone_is_removed_and_all_else_is_as_it_was(path: Path) -> None:
    before = held(path)
    done = compact(str(path), second)
    assert (done.removed, done.before, done.after) == (
        1,
        size_of(path) + done.before - done.after,
        size_of(path),
    )
    assert done.before - done.after > 20 * 3000
    (key,) = held(path)
    assert held(path)[key] == before[key]
    assert faults(path) == []
    assert os.listdir(path.parent) == ["log.db"]


def test_a_compacted_log_goes_on(path: Path) -> None:
    async def go_on() -> None:
        log = SqliteLog(path)
        await log.start()
        session = Written(log, "another")
        await session.open()
        await session.note(3)
        await log.close()

    compact(str(path), second)
    asyncio.run(go_on())
    assert len(held(path)) == 2
    assert faults(path) == []


def test_what_waits_to_be_swept_is_swept(path: Path) -> None:
    damage(path, "UPDATE session SET floor = 38 WHERE id = 2")
    damage(path, "UPDATE session SET key = NULL, record = x'', floor = committed WHERE id = 1")
    damage(  # more than one sweep takes
        path,
        "WITH RECURSIVE n (n) AS (SELECT 3 UNION ALL SELECT n + 1 FROM n LIMIT 600) "
        "INSERT INTO inbox (session, number, digest, data) SELECT 1, n, x'', x'' FROM n",
    )
    done = compact(str(path), lambda stored: False)
    assert done.removed == 0
    with snapshot(path) as log:
        rows = [
            *log.rows(
                "SELECT 'segment', session, last FROM segment UNION SELECT 'inbox', session, 0 FROM inbox"
            )
        ]
        assert rows == [("segment", 2, 40)]
        assert [*log.rows("SELECT id FROM session")] == [(2,)]


async def test_a_log_that_somebody_has_open_is_left_alone(path: Path) -> None:
    log = SqliteLog(path)
    await log.start()  # and no owner joined: what counts is that the file is open
    before = await log.sessions()
    with pytest.raises(UsageError, match="is in use"):
        compact(str(path), second)
    assert await log.sessions() == before
    await log.close()
    assert compact(str(path), second).removed == 1


def test_what_a_killed_server_left_is_taken_in(path: Path, tmp_path: Path) -> None:
    left = tmp_path / "left" / "log.db"

    async def kill() -> None:
        log = SqliteLog(path)
        await log.start()
        session = Written(log, "another")
        await session.open()
        await session.note(3)
        shutil.copytree(path.parent, left.parent)
        await log.close()

    asyncio.run(kill())
    assert len(os.listdir(left.parent)) == 3
    assert size_of(left) > left.stat().st_size + 2 * PAGE
    before = size_of(left)
    done = compact(str(left), second)
    assert (done.removed, done.before) == (1, before)
    assert held(left).keys() == held(path).keys() - {
        key for key, (stored, *_) in held(path).items() if second(stored)
    }
    assert os.listdir(left.parent) == ["log.db"]


@pytest.mark.parametrize("left", [[], ["log.db-shm", "log.db-wal"]], ids=["at rest", "killed"])
@pytest.mark.parametrize("at", ["segment", "segment_order", "schema"])
def test_a_damaged_log_is_left_alone(path: Path, at: str, left: list[str]) -> None:
    flip(path, root(path, at) if at != "schema" else path.read_bytes().index(b"CREATE TABLE inbox"))
    before = path.read_bytes()
    for name in left:
        path.with_name(name).touch()
    with pytest.raises(StorageError, match="is damaged; nothing was changed"):
        compact(str(path), second)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["log.db"]


def test_a_log_of_another_version_is_left_alone(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("user_version", 1)
    before = path.read_bytes()
    with pytest.raises(SchemaError, match="version 1"):
        compact(str(path), second)
    assert path.read_bytes() == before


def fills(after: int) -> Callable[[str, str], None]:
    """A disk has room for so many writes."""
    left = after

    def before(what: str, path: str) -> None:
        nonlocal left
        left -= what == "write"
        if what == "write" and left < 0:
            raise apsw.FullError

    return before


def test_a_disk_that_is_full_at_any_moment_leaves_a_log_whole(path: Path) -> None:
    kept, copy = held(path), path.with_name("copy.db")
    (key,) = [key for key, (stored, *_) in kept.items() if not second(stored)]

    async def restart() -> None:
        log = SqliteLog(copy)
        await log.start()
        await log.close()

    told: list[str] = []
    with mounted() as disk:
        while len(told) < 1000:
            shutil.copy(path, copy)
            disk.before = fills(len(told))
            try:
                done = compact(str(copy), second, vfs=disk.name)
            except StorageError as error:
                told.append(str(error))
            else:
                assert done.after < done.before
                assert not copy.with_name("copy.db-wal").exists()
                break
            asyncio.run(restart())  # which takes in what could not be moved out of the write-ahead log
            found = held(copy)
            assert found[key] == kept[key], len(told)
            assert found.keys() in (kept.keys(), {key}), len(told)
            assert faults(copy) == [], len(told)
    assert 40 < len(told) < 1000
    assert all("there is no room to compact" in text for text in told)
