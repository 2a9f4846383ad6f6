"""What is over leaves nothing behind: sessions by the thousand, opened and ended (B4, L4, §8)."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import weakref
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gapless.backends.base import BackendFactory
from gapless.log.sqlite import SqliteLog
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import Emitted
from gapless.protocol.jsonrpc import peek
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.session import View
from gapless.protocol.settings import Limits
from gapless.server import sessions as module
from gapless.server.intake import message_input
from gapless.server.sessions import Sessions
from tests.conftest import Tally
from tests.server.harness import Scripted, ScriptedBackends, encode, note, request

AT_ONCE = 100
LIMITS = Limits(session_expiry=600.0, tombstone=3600.0)


class Clock:
    """Unix time, as the log and the sessions are told it."""

    def __init__(self) -> None:
        self.now = 1.8e9

    def time(self) -> float:
        return self.now


@asynccontextmanager
async def sessions_on(log: SqliteLog, backends: BackendFactory | None = None) -> AsyncGenerator[Sessions]:
    found = Sessions(log, backends or ScriptedBackends(), LIMITS)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


async def live_and_end(sessions: Sessions) -> None:
    """A session's life: opened, some events, ended."""
    opened = await sessions.open(View.SESSION, "anonymous")
    assert not isinstance(opened, Refusal)
    _, live = opened
    for text in ("a" * 500, "b" * 500):
        data = encode(note("notifications/message", data=text))
        await live.put(Emitted(data, peek(data)))
    await live.end(Reason.SESSION_ENDED)


def size_of(path: Path) -> int:
    return os.path.getsize(path) + os.path.getsize(f"{path}-wal")


async def generations(folder: Path, count: int, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """So many sessions, some at a time, a quarter of a tombstone apart: file size and memory, each time."""
    clock = Clock()
    patch.setattr(module.time, "time", clock.time)
    out: list[tuple[int, int]] = []
    path = folder / "log.db"
    # The disk is waited for by nobody: what is looked at is what is in the file, not what outlives a machine.
    log = SqliteLog(path, synchronous="off", clock=clock.time)
    async with sessions_on(log) as sessions:
        store = log._store  # pyright: ignore[reportPrivateUsage]
        assert store is not None
        for _ in range(count // AT_ONCE):
            await asyncio.gather(*(live_and_end(sessions) for _ in range(AT_ONCE)))
            await sessions.clean(0.0)
            assert not list(sessions.all())
            await asyncio.gather(*sessions._leaving)  # pyright: ignore[reportPrivateUsage]
            assert store.tails.size == 0, "no events in memory that nobody will read"
            clock.now += LIMITS.tombstone / 4
            await sessions._sweep()  # pyright: ignore[reportPrivateUsage]
            out.append((size_of(path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        kept = await sessions.log.sessions()
        assert len(kept) <= 4 * AT_ONCE, "a tombstone's worth"
        gc.collect()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert len(tasks) <= 4, tasks
    return out


@pytest.mark.rule("B4")
async def test_sessions_that_are_over_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [size for size, _ in await generations(tmp_path, 3_000, monkeypatch)]
    assert max(sizes[20:]) <= max(sizes[:10]) * 1.1


@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.rule("B4")
async def test_a_hundred_thousand_sessions_leave_file_and_memory_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    found = await generations(tmp_path, 100_000, monkeypatch)
    (early, before), (late, after) = found[len(found) // 10], found[-1]
    tally(Counter(sessions=100_000))
    tally(Counter(bytes=early, KiB=before), "the file, and memory, after a tenth of them")
    tally(Counter(bytes=late, KiB=after), "at the end")
    assert max(size for size, _ in found[len(found) // 10 :]) <= 1.1 * max(size for size, _ in found[:100])
    assert after - before < 16 * 1024


async def test_a_session_that_was_let_go_is_not_left_for_the_garbage_collector(tmp_path: Path) -> None:
    async with sessions_on(SqliteLog(tmp_path / "log.db", synchronous="off")) as sessions:
        await live_and_end(sessions)
        (gone,) = [weakref.ref(live.machine) for live in sessions.all()]
        gc.disable()
        try:
            await sessions.clean(0.0)
            await asyncio.gather(*sessions._leaving)  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
            assert gone() is None
        finally:
            gc.enable()


class Clinging(Scripted):
    """A backend that cannot close."""

    async def close(self) -> None:
        raise OSError("it clings on")


class ClingingBackends(ScriptedBackends):
    kind = Clinging


async def test_a_session_whose_backend_does_not_close_is_let_go_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, backends = SqliteLog(tmp_path / "log.db", synchronous="off"), ClingingBackends()
    async with sessions_on(log, backends) as sessions:
        opened = await sessions.open(View.STREAM, "anonymous")
        assert not isinstance(opened, Refusal)
        _, live = opened
        asked = encode(request(1, "tools/list"))
        await live.put(message_input(asked, LIMITS.max_message_bytes, answer_on=live.connection()))
        backend = await backends.opened()
        await backend.take()
        live.detach(ConnectionId(1))
        await live.end(Reason.SESSION_ENDED)
        await sessions.clean(0.0)
        await asyncio.gather(*sessions._leaving)  # pyright: ignore[reportPrivateUsage]
        store = log._store  # pyright: ignore[reportPrivateUsage]
        assert store is not None
        assert store.tails.size == 0
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in told] == [f"session {live.name}: its MCP server did not close"]
    assert "it clings on" in str(told[0].exc_info)
