"""What the SQLite log promises beyond the contract: files, transactions, failures, restarts."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import apsw
import pytest

from gapless.errors import ConflictError, StorageError, UsageError
from gapless.log import database, open_log, queries, threads
from gapless.log.base import BelowFloorError, Durability, Entry, SessionKey
from gapless.log.memory import MemoryLog
from gapless.log.sqlite import SqliteLog
from tests.log.disk import mounted
from tests.log.written import DIGEST, GRAIN, PLENTY, A, B, blocks, key, link, opened, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def writer(log: SqliteLog) -> apsw.Connection:
    """The writer's own connection; to be touched only while the writer has nothing to do."""
    store = log._store
    assert store is not None
    return store.writer.db


class Transactions:
    """Counts the transactions of a log, and can hold one up in the middle of its commit."""

    def __init__(self, log: SqliteLog) -> None:
        self.count = 0
        self._free = Event()
        self._free.set()
        self._entered = Event()
        writer(log).set_commit_hook(self._commit)

    def _commit(self) -> bool:
        self.count += 1
        self._entered.set()
        self._free.wait(30)
        return False

    def hold(self) -> None:
        self._free.clear()
        self._entered.clear()

    async def held(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 30)

    def release(self) -> None:
        self._free.set()


async def turn() -> None:
    """Let every task that can run do so once."""
    await asyncio.sleep(0)


# --- Restarts -------------------------------------------------------------------------------


async def test_a_restart_keeps_everything(path: Path) -> None:
    entries = (Entry(1, DIGEST, b"one"), Entry(2, DIGEST, b""))
    async with opened(path) as log:
        for name in (A, B):
            await log.create(name, b"record", link(0))
        await log.commit(A, write(1, 3, entries=entries, dispatched=1, record=b"state", floor=1))
        await log.commit(A, write(4, 4))
        await log.acquire(A, 0)
        before = await log.sessions()
    async with opened(path) as log:
        assert await log.sessions() == before
        assert await log.read(A, 1, 9, PLENTY) == (blocks(2, 4), 4)
        assert [await log.link(A, seq) for seq in range(6)] == [None, *map(link, range(1, 5)), None]
        assert await log.entries(A, 0, 9) == entries
        with pytest.raises(ConflictError):
            await log.commit(A, write(5, 5))
        await log.commit(A, write(5, 5, fence=1))
        assert await log.read(A, 3, 9, PLENTY) == (blocks(4, 5), 5)
        with pytest.raises(BelowFloorError):
            await log.read(A, 0, 9, PLENTY)


async def test_one_log_can_be_started_again_after_its_close(path: Path) -> None:
    log = SqliteLog(path)
    for seq in (1, 2):
        await log.start()
        if seq == 1:
            await log.create(A, b"", link(0))
        await log.commit(A, write(seq, seq))
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, seq), seq)
        await log.close()


async def test_a_log_that_is_not_open_says_so(path: Path) -> None:
    log = SqliteLog(path)
    for _ in range(2):
        for step in (
            log.create(A, b"", link(0)),
            log.commit(A, write(1, 1)),
            log.read(A, 0, 9, PLENTY),
            log.load(A),
            log.link(A, 1),
            log.remove(A),
            log.acquire(A, 0),
        ):
            with pytest.raises(StorageError, match="is not open"):
                await step
        await log.start()
        await log.close()


async def test_closing_finishes_the_commits_under_way(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        transactions = Transactions(log)
        transactions.hold()
        commit = asyncio.create_task(log.commit(A, write(1, 1)))
        await transactions.held()
        close = asyncio.create_task(log.close())
        await turn()
        transactions.release()
        await asyncio.gather(commit, close)
    async with opened(path) as log:
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 1), 1)


async def test_closing_waits_for_the_queries_under_way(path: Path) -> None:
    free, asked = Event(), Event()

    def wait(what: str, _: str) -> None:
        if what == "read":
            asked.set()
            assert free.wait(30)

    with mounted() as disk:
        async with opened(path, cache_bytes=0, vfs=disk.name) as log:
            await log.create(A, b"", link(0))
            await log.commit(A, write(1, 1))
            disk.before = wait
            read = asyncio.create_task(log.read(A, 0, 9, PLENTY))
            assert await asyncio.to_thread(asked.wait, 30)
            close = asyncio.create_task(log.close())
            await turn()
            free.set()
            await close
            assert await read == (blocks(1, 1), 1)


# --- Durability -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("synchronous", "pragma", "durability"),
    [("full", 2, Durability.FSYNC), ("normal", 1, Durability.OS), ("off", 0, Durability.OS)],
)
async def test_durability_is_advertised_as_it_is_asked_of_sqlite(
    path: Path, synchronous: str, pragma: int, durability: Durability
) -> None:
    async with opened(path, synchronous=synchronous) as log:
        assert log.durability is durability
        await log.create(A, b"", link(0))  # the writer has nothing to do any more
        assert writer(log).pragma("synchronous") == pragma


def test_an_unknown_synchronous_is_a_usage_error(path: Path) -> None:
    with pytest.raises(UsageError, match="full, normal, off"):
        SqliteLog(path, synchronous="maybe")


# --- Group commit ---------------------------------------------------------------------------


async def test_writes_that_arrive_during_a_commit_are_the_next_transaction(path: Path) -> None:
    async with opened(path) as log:
        names = [key(str(number)) for number in range(300)]
        await asyncio.gather(*(log.create(name, b"", link(0)) for name in [A, *names]))
        transactions = Transactions(log)
        transactions.hold()
        first = asyncio.create_task(log.commit(A, write(1, 1)))
        await transactions.held()
        entries = (Entry(1, DIGEST, b""),)
        rest = [asyncio.create_task(log.commit(name, write(1, 2, entries=entries))) for name in names]
        await turn()
        transactions.release()
        await asyncio.gather(first, *rest)
        assert transactions.count == 2
        for name in names:
            assert await log.read(name, 0, 9, PLENTY) == (blocks(1, 2), 2)
            assert await log.entries(name, 0, 9) == entries


async def test_nothing_of_a_write_can_be_read_before_it_is_committed(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        transactions = Transactions(log)
        transactions.hold()
        commit = asyncio.create_task(log.commit(A, write(1, 1, record=b"new")))
        await transactions.held()
        stored = await log.load(A)
        assert stored is not None
        assert (stored.committed, stored.record) == (0, b"")
        assert await log.read(A, 0, 9, PLENTY) == (b"", 0)
        assert await log.link(A, 1) is None
        assert not commit.done()
        transactions.release()
        await commit


async def test_a_write_whose_caller_was_cancelled_leaves_a_whole_log_and_its_group_alone(path: Path) -> None:
    async with opened(path) as log:
        for name in (A, B):
            await log.create(name, b"", link(0))
        await log.commit(A, write(1, 2))
        transactions = Transactions(log)
        transactions.hold()
        first = asyncio.create_task(log.commit(B, write(1, 1)))
        await transactions.held()
        cancelled = asyncio.create_task(log.commit(A, write(3, 3, floor=1)))
        other = asyncio.create_task(log.create(key("c"), b"", link(0)))
        await turn()
        cancelled.cancel()
        transactions.release()
        await asyncio.gather(first, other)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await log.commit(A, write(4, 4))
        assert await log.read(A, 1, 9, PLENTY) == (blocks(2, 4), 4)
        with pytest.raises(BelowFloorError):
            await log.read(A, 0, 9, PLENTY)


async def test_what_is_handed_over_just_as_the_writer_looks_away_is_not_forgotten(path: Path) -> None:
    loop, handed_over = asyncio.get_running_loop(), Event()

    def hand_over() -> None:
        tasks.append(loop.create_task(log.create(B, b"", link(0))))
        loop.call_soon(handed_over.set)

    class Jobs(deque[Any]):
        def __bool__(self) -> bool:
            if len(self):
                return True
            if not handed_over.is_set():
                loop.call_soon_threadsafe(hand_over)
                handed_over.wait(30)
            return False

    tasks: list[asyncio.Task[None]] = []
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        store = log._store
        assert store is not None
        store.writer._jobs = Jobs()
        await log.commit(A, write(1, 1))
        await asyncio.wait_for(tasks[0], 30)


async def test_a_waiting_loop_stands_aside_for_the_thread_it_waits_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stood = asyncio.Event()
    monkeypatch.setattr(threads.time, "sleep", lambda _: stood.set())
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        transactions = Transactions(log)
        transactions.hold()
        commit = asyncio.create_task(log.commit(A, write(1, 1)))
        await stood.wait()
        transactions.release()
        await commit


# --- Sweeping -------------------------------------------------------------------------------


def rows(path: Path) -> dict[str, int]:
    with closing(apsw.Connection(str(path))) as db:
        return {
            table: db.execute(f"SELECT count(*) FROM {table}").get
            for table in ("session", "segment", "inbox")
        }


async def fill(log: SqliteLog, name: SessionKey, writes: int) -> None:
    await log.create(name, b"", link(0))
    for seq in range(1, writes + 1):
        await log.commit(name, write(seq, seq, entries=(Entry(seq, DIGEST, b""),)))


async def test_evicted_events_leave_the_file(path: Path) -> None:
    async with opened(path, synchronous="off") as log:
        await fill(log, A, 10)
        await log.commit(A, write(11, 13, floor=9))
        assert rows(path) == {"session": 1, "segment": 2, "inbox": 10}
        await log.commit(A, write(14, 14, floor=12))
        assert rows(path) == {"session": 1, "segment": 2, "inbox": 10}


async def test_a_large_eviction_leaves_the_file_a_chunk_at_a_time(path: Path) -> None:
    async with opened(path, synchronous="off") as log:
        await fill(log, A, 600)
        await log.create(B, b"", link(0))
        transactions = Transactions(log)
        transactions.hold()
        commit = asyncio.create_task(log.commit(A, write(601, 601, floor=600)))
        await transactions.held()
        other = asyncio.create_task(log.commit(B, write(1, 1)))
        await turn()
        transactions.release()
        await asyncio.gather(commit, other)
        assert rows(path)["segment"] <= 2 + 600 - 2 * 256
        await log.commit(B, write(2, 2))
        assert rows(path)["segment"] == 3


async def test_a_removed_session_leaves_the_file(path: Path) -> None:
    async with opened(path, synchronous="off") as log:
        await fill(log, A, 300)
        await fill(log, B, 2)
        await log.remove(A)
        # A chunk is swept between any two transactions.
        await log.commit(B, write(3, 3))
        await log.commit(B, write(4, 4))
        assert rows(path) == {"session": 1, "segment": 4, "inbox": 2}
        assert await log.read(B, 0, 9, PLENTY) == (blocks(1, 4), 4)


async def test_what_is_still_to_be_swept_is_in_no_run(path: Path) -> None:
    ticks = itertools.count(0.0, 100.0)
    async with opened(path, synchronous="off", inline=True, clock=lambda: next(ticks)) as log:
        await fill(log, A, 1500)
        await log.commit(A, write(1501, 1502, floor=1501))
        assert rows(path)["segment"] > 1, "all is swept already"
        assert [(run.last, run.events) for run in await log.runs(A, GRAIN)] == [(1502, 1)]


async def test_what_is_to_be_swept_leaves_the_file_without_another_commit(path: Path) -> None:
    async with opened(path, synchronous="off", inline=True) as log:
        await fill(log, A, 600)
        await log.remove(A)
        for _ in range(10):
            await turn()
        assert rows(path) == {"session": 0, "segment": 0, "inbox": 0}


@pytest.mark.parametrize("error", [None, MemoryError])
async def test_what_a_failed_sweep_left_is_swept_after_the_next_start(
    path: Path, error: type[Exception] | None
) -> None:
    def authorize(action: int, table: str | None, *_: object) -> int:
        if (action, table) != (apsw.SQLITE_DELETE, "inbox"):
            return apsw.SQLITE_OK
        if error is not None:
            raise error
        return apsw.SQLITE_DENY

    async with opened(path, synchronous="off") as log:
        await fill(log, A, 3)
        await log.create(B, b"", link(0))
        writer(log).authorizer = authorize
        await log.remove(A)
        await log.commit(B, write(1, 1))
        assert await log.load(A) is None
        assert [stored.key for stored in await log.sessions()] == [B]
        assert rows(path) == {"session": 2, "segment": 4, "inbox": 3}
    async with opened(path) as log:
        await log.commit(B, write(2, 2))
        await log.commit(B, write(3, 3))
        assert rows(path) == {"session": 1, "segment": 3, "inbox": 0}


# --- Failures -------------------------------------------------------------------------------


async def test_a_full_disk_fails_commits_until_there_is_space_again(path: Path) -> None:
    async with opened(path) as log:
        for name in (A, B):
            await log.create(name, b"", link(0))
        await log.commit(A, write(1, 1))
        db = writer(log)
        db.pragma("max_page_count", db.pragma("page_count") + 4)
        big = write(2, 2, b"x" * 100_000, entries=(Entry(1, DIGEST, b""),), record=b"big")
        outcomes = await asyncio.gather(
            log.commit(A, big), log.create(key("c"), b"x" * 100_000, link(0)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [StorageError, StorageError]
        assert isinstance(outcomes[0], StorageError)
        assert str(path) in outcomes[0].line
        assert "full" in outcomes[0].line
        assert "\n" not in outcomes[0].line
        stored = await log.load(A)
        assert stored is not None
        assert (stored.committed, stored.received, stored.record) == (1, 0, b"")
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 1), 1)
        assert await log.load(key("c")) is None
        await log.commit(B, write(1, 1))  # what still fits goes on
        db.pragma("max_page_count", 2**20)
        await log.commit(A, big)
        assert await log.read(A, 1, 9, PLENTY) == (big.segment, 2)


@pytest.mark.parametrize("pages", [2, 20])
async def test_a_transaction_of_several_statements_fails_whole(path: Path, pages: int) -> None:
    async with opened(path, inline=True) as log:  # so that both are one group
        for name in (A, B):
            await log.create(name, b"", link(0))
        db = writer(log)
        db.pragma("max_page_count", db.pragma("page_count") + pages)
        entries = tuple(Entry(number, DIGEST, b"x" * 100) for number in range(1, 1001))
        steps = (log.commit(A, write(1, 1)), log.commit(B, write(1, 2, entries=entries)))
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StorageError, StorageError]
        assert rows(path) == {"session": 2, "segment": 0, "inbox": 0}
        db.pragma("max_page_count", 2**20)
        await log.commit(B, write(1, 2, entries=entries))
        assert await log.entries(B, 0, 9999) == entries


async def test_a_write_that_failed_after_landing_is_recognised_when_tried_again(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        with closing(apsw.Connection(str(path))) as db:
            # As if its commit had reached the file, and only then the error had been reported.
            db.execute("UPDATE session SET committed = 2, link = ?, received = 1", (link(2),))
            db.execute("INSERT INTO segment VALUES (1, 1, 1, 2, ?, 0)", (blocks(1, 2),))
            db.execute("INSERT INTO inbox VALUES (1, 1, 1, ?, x'')", (DIGEST,))
        await log.commit(A, write(1, 2, entries=(Entry(1, DIGEST, b""),)))
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 2), 2)
        assert rows(path) == {"session": 1, "segment": 1, "inbox": 1}


async def test_what_no_database_can_hold_fails_and_the_log_goes_on(path: Path) -> None:
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        with pytest.raises(StorageError, match="cannot be written"):
            await log.commit(A, write(1, 1, dispatched=2**63))
        await log.commit(A, write(1, 1))


async def test_a_file_locked_by_another_process_fails_commits_until_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 0)
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        with closing(apsw.Connection(str(path))) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError, match="locked") as failed:
                await log.commit(A, write(1, 1))
            assert str(failed.value.hint).startswith("another process is writing to it")
            assert await log.read(A, 0, 9, PLENTY) == (b"", 0)
        await log.commit(A, write(1, 1))


def damage(path: Path) -> None:
    """Spoil everything but the first page."""
    data = path.read_bytes()
    path.write_bytes(data[:4096].ljust(len(data), b"\xa5"))


async def test_damage_is_reported_not_returned(path: Path) -> None:
    async with opened(path, synchronous="off") as log:
        await fill(log, A, 50)
    damage(path)
    async with opened(path) as log:
        with pytest.raises(StorageError, match=r"log\.db cannot be read: .*malformed"):
            await log.read(A, 0, 99, PLENTY)
        with pytest.raises(StorageError, match=r"log\.db cannot be written: .*malformed"):
            await log.commit(A, write(51, 51))


@pytest.mark.parametrize("missing", [2, 4, 6])
async def test_events_that_are_missing_in_the_file_are_damage(path: Path, missing: int) -> None:
    async with opened(path, cache_bytes=0) as log:
        await log.create(A, b"", link(0))
        for first in (1, 3, 5):
            await log.commit(A, write(first, first + 1))
        with closing(apsw.Connection(str(path))) as db:
            db.execute("DELETE FROM segment WHERE last = ?", (missing,))
        steps = (
            log.read(A, missing - 2, 9, PLENTY),
            log.read(A, missing - 1, missing, PLENTY),
            log.link(A, missing - 1),
            log.runs(A, GRAIN),
        )
        for step in steps:
            with pytest.raises(StorageError, match=r"log\.db is damaged: .*event"):
                await step


FAILURES = [
    apsw.IOError,
    apsw.FullError,
    apsw.ReadOnlyError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.BusyError,
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("what", ["write", "sync"])
async def test_whatever_a_disk_does_to_a_commit_is_a_storage_error_and_the_log_goes_on(
    path: Path, what: str, failure: type[apsw.Error]
) -> None:
    def fail(at: str, _: str) -> None:
        if at == what:
            raise failure("simulated")

    with mounted() as disk:
        async with opened(path, vfs=disk.name) as log:
            for name in (A, B):
                await log.create(name, b"", link(0))
            disk.before = fail
            steps = (log.commit(A, write(1, 2)), log.commit(B, write(1, 1)), log.join(""))
            for outcome in await asyncio.gather(*steps, return_exceptions=True):
                assert isinstance(outcome, StorageError)
                assert "log.db cannot be written: simulated" in outcome.line
            disk.before = lambda what, path: None
            assert await log.read(A, 0, 9, PLENTY) == (b"", 0)
            assert await log.owners() == ()
            await log.commit(A, write(1, 2))
        async with opened(path) as log:
            assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 2), 2)


@pytest.mark.parametrize("failure", FAILURES)
async def test_whatever_a_disk_does_to_a_query_is_a_storage_error_and_the_log_goes_on(
    path: Path, failure: type[apsw.Error], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 0)

    def fail(at: str, _: str) -> None:
        if at == "read":
            raise failure("simulated")

    with mounted() as disk:
        async with opened(path, vfs=disk.name, cache_bytes=0) as log:
            await log.create(A, b"", link(0))
            await log.commit(A, write(1, 2))
            disk.before = fail
            for step in (
                log.read(A, 0, 9, PLENTY),
                log.runs(A, GRAIN),
                log.link(A, 1),
                log.load(A),
                log.owners(),
            ):
                with pytest.raises(StorageError, match=r"log\.db cannot be read: simulated"):
                    await step
            disk.before = lambda what, path: None
            assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 2), 2)


async def test_an_owner_that_another_process_has_replaced_is_fenced_off(path: Path) -> None:
    async with opened(path) as old, opened(path) as new:
        await old.create(A, b"", link(0))
        await old.commit(A, write(1, 2))
        fence = await new.acquire(A, 0)
        await new.commit(A, write(3, 3, fence=fence, floor=1))
        with pytest.raises(ConflictError, match="under fence 1"):
            await old.commit(A, write(3, 3))
        # Refused, it holds nothing for true any more that it has not read again.
        assert await old.read(A, 1, 9, PLENTY) == (blocks(2, 3), 3)
        with pytest.raises(BelowFloorError):
            await old.read(A, 0, 9, PLENTY)


@pytest.mark.rule("N1")
async def test_of_processes_that_take_one_session_at_once_one_succeeds_and_its_owner_learns_of_it(
    path: Path,
) -> None:
    logs = [SqliteLog(path) for _ in range(4)]
    await asyncio.gather(*(log.start() for log in logs))
    owners = await asyncio.gather(*(log.join(str(at)) for at, log in enumerate(logs)))
    await logs[0].create(A, b"", link(0), owners[0])
    for fence in range(3):
        outcomes = await asyncio.gather(
            *(log.acquire(A, fence, owner) for log, owner in zip(logs[1:], owners[1:], strict=True)),
            return_exceptions=True,
        )
        assert sorted(map(str, map(type, outcomes))) == sorted(map(str, [int, ConflictError, ConflictError]))
        assert fence + 1 in outcomes
    assert await logs[0].beat(owners[0]) == 1
    assert await logs[0].owned(owners[0]) == frozenset()
    for log in logs:
        await log.close()


async def test_recent_events_are_read_without_the_file_and_older_ones_from_it(path: Path) -> None:
    async with opened(path, cache_bytes=2000) as log:
        await log.create(A, b"", link(0))
        for seq in range(1, 31):
            await log.commit(A, write(seq, seq))
        store = log._store
        assert store is not None
        assert store.tails.size <= 2000
        store.reader.close()  # only the cache can answer now
        assert await log.read(A, 28, 99, PLENTY) == (blocks(29, 30), 30)
        assert await log.link(A, 29) == link(29)
        with pytest.raises(StorageError, match="cannot be read"):
            await log.read(A, 0, 99, PLENTY)


# --- URLs -----------------------------------------------------------------------------------


def test_a_memory_url_is_a_log_in_memory() -> None:
    log = open_log("memory:")
    assert isinstance(log, MemoryLog)
    assert log.place is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///name.db", "{cwd}/name.db"),
        ("sqlite:///below/name.db", "{cwd}/below/name.db"),
        ("sqlite:////var/lib/name.db", "/var/lib/name.db"),
        ("sqlite:///a%20b%3F.db", "{cwd}/a b?.db"),
        ("sqlite:///:memory:", "{cwd}/:memory:"),
    ],
)
def test_a_sqlite_url_names_its_file(
    url: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = open_log(url)
    assert isinstance(log, SqliteLog)
    assert log.place == expected.format(cwd=tmp_path)
    assert log.durability is Durability.FSYNC


@pytest.mark.parametrize("synchronous", ["full", "normal", "off"])
def test_a_sqlite_url_may_say_how_durable(synchronous: str) -> None:
    log = open_log(f"sqlite:///name.db?synchronous={synchronous}")
    assert log.durability is (Durability.FSYNC if synchronous == "full" else Durability.OS)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "memory:x",
        "memory://",
        "name.db",
        "/name.db",
        "sqlite:",
        "sqlite:name.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/name.db",
        "sqlite:///name.db#part",
        "sqlite:///nul%00.db",
        "sqlite:///name.db?mode=ro",
        "sqlite:///name.db?synchronous",
        "sqlite:///name.db?synchronous=",
        "sqlite:///name.db?synchronous=maybe",
        "sqlite:///name.db?synchronous=off&synchronous=full",
        "sqlite://[name.db",
        "postgres://host/db",
    ],
)
def test_any_other_url_is_refused_with_what_is_accepted(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_log(url)
    assert any(word in caught.value.line for word in ("accepted: memory:", "full, normal, off"))


async def test_a_long_read_asks_the_disk_once_for_many_of_its_parts_and_never_for_what_is_evicted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    segments = queries.segments

    def counted(db: apsw.Connection, key: SessionKey, after: int, *rest: int) -> Any:
        asked.append(after)
        return segments(db, key, after, *rest)

    monkeypatch.setattr(queries, "segments", counted)
    async with opened(path) as log:
        await log.create(A, b"", link(0))
        for last in (10, 20, 30):
            await log.commit(A, write(last - 9, last))
    async with opened(path, cache_bytes=0) as log:
        after, data = 0, b""
        while after < 25:
            part, after = await log.read(A, after, 30, len(blocks(1, 3)))
            data += part
        assert asked == [0]
        assert data == blocks(1, after)
        await log.commit(A, write(31, 31, floor=29))
        with pytest.raises(BelowFloorError):
            await log.read(A, after, 31, 1)
