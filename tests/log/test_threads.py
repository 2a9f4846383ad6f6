"""Without threads a log does all it has to do on the loop, in an order that repeats itself."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gapless.log.sqlite import SqliteLog
from tests.log.disk import mounted
from tests.log.written import GRAIN, PLENTY, A, B, blocks, link, opened, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


async def test_inline_no_thread_is_started_and_no_timer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_at", None)
    async with opened(path, inline=True) as log:
        await log.create(A, b"", link(0))
        await log.commit(A, write(1, 2))
        assert await log.load(A) is not None
        assert threading.active_count() == before
    monkeypatch.undo()
    async with opened(path) as log:
        assert threading.active_count() == before + 2
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 2), 2)


@pytest.mark.parametrize("inline", [False, True])
async def test_closing_finishes_what_was_handed_over(path: Path, inline: bool) -> None:
    async with opened(path, inline=inline) as log:
        await log.create(A, b"", link(0))
        handed_over = [
            asyncio.ensure_future(step) for step in (log.commit(A, write(1, 1)), log.runs(A, GRAIN))
        ]
        await asyncio.sleep(0)  # both have begun
    assert [task.done() for task in handed_over] == [True, True]
    async with opened(path) as log:
        assert await log.read(A, 0, 9, PLENTY) == (blocks(1, 1), 1)


@pytest.mark.parametrize("inline", [False, True])
async def test_what_fails_in_a_query_reaches_who_asked_and_nobody_else(path: Path, inline: bool) -> None:
    async with opened(path, inline=inline, cache_bytes=0) as log:
        await log.create(A, b"", link(0))
        await log.commit(A, write(1, 1))
        outcomes = await asyncio.gather(
            log.entries(A, 2**63, 1), log.read(A, 0, 9, PLENTY), return_exceptions=True
        )
        assert isinstance(outcomes[0], OverflowError)
        assert outcomes[1] == (blocks(1, 1), 1)


async def lived(directory: Path) -> list[str]:
    """All that happens, in order, while some tasks use a log at once."""
    happened: list[str] = []

    async def note(name: str, step: Coroutine[Any, Any, object]) -> None:
        happened.append(f"{name}: {await step!r}")

    os.mkdir(directory)
    with mounted() as disk:
        disk.before = lambda what, file: happened.append(f"{what} {os.path.basename(file)}")
        ticks = itertools.count(1000.0)
        log = SqliteLog(
            directory / "log.db", inline=True, vfs=disk.name, cache_bytes=0, clock=lambda: next(ticks)
        )
        await log.start()
        happened.append("started")
        await asyncio.gather(*(note("create", log.create(name, b"", link(0))) for name in (A, B)))
        for seq in range(1, 6):
            steps = [
                note("commit a", log.commit(A, write(seq, seq, b"x" * 3000))),
                note("read a", log.read(A, seq - 1, 9, PLENTY)),
                note("commit b", log.commit(B, write(seq, seq))),
                note("join", log.join("")),
                note("runs b", log.runs(B, GRAIN)),
            ]
            await asyncio.gather(*(steps[(seq + at) % 5] for at in range(5)))
        happened.append("closing")
        await log.close()
    return happened


async def test_inline_everything_happens_in_the_same_order_each_time(tmp_path: Path) -> None:
    first, second, third = [await lived(tmp_path / name) for name in ("1", "2", "3")]
    assert first == second == third
    served = first[first.index("started") : first.index("closing")]
    assert len(served) > 40
    assert served.count("sync log.db-wal") == 6, "what gathered was not committed together"
