"""A real server on a log that fails under it: told as `storage`, retried, gone on with by itself (L2, §8)."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

import gapless
from gapless.cli.target import serving

LADDER = "examples.ladder_server:server"
FAR = 30.0
"""Seconds after which something that is to happen has not."""


class Raw:
    """A session of the session view, by hand: what is acknowledged to it is seen as it is."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self._url, self._http = url, http
        self.session = ""
        self.acknowledged = 0

    async def open(self) -> None:
        answer = await self._http.post(f"{self._url}/session")
        assert answer.status_code == 201
        self.session = answer.json()["session"]

    async def post(self, number: int) -> tuple[int, dict[str, Any]]:
        """POST a request under a number; its answer is an event, whatever it says."""
        request = {"jsonrpc": "2.0", "id": number, "method": "ping", "params": {"pad": "x" * 2000}}
        headers = {"Mcp-Message-Number": str(number), "Mcp-Client": "p"}
        answer = await self._http.post(
            f"{self._url}/session/{self.session}/messages", json=request, headers=headers
        )
        body: dict[str, Any] = answer.json()
        if answer.status_code == 202:
            self.acknowledged = body["received"]
        return answer.status_code, body | {"retry-after": answer.headers.get("retry-after")}

    async def until_refused(self) -> dict[str, Any]:
        """POST until something is refused; what it is told."""
        for number in range(self.acknowledged + 1, 10_000):
            status, body = await self.post(number)
            if status != 202:
                assert status == 503
                assert body["retry-after"] is not None
                return body
        raise AssertionError("the log took everything")

    async def until_accepted(self) -> None:
        """Repeat the next message, as a client does, until it is received."""
        async with asyncio.timeout(FAR):
            while (await self.post(self.acknowledged + 1))[0] != 202:
                pass


@asynccontextmanager
async def served(log: Path, port: int = 0) -> AsyncGenerator[tuple[str, int]]:
    """`gapless serve` on a log; its URL and its process."""
    async with serving(("--log", f"sqlite:///{log}", LADDER)) as running:
        yield running


@asynccontextmanager
async def by_hand(url: str) -> AsyncGenerator[Raw]:
    async with httpx2.AsyncClient(timeout=FAR) as http:
        raw = Raw(url, http)
        await raw.open()
        yield raw


def received(log: Path) -> int:
    """How many messages the log has, of its one session that has any."""
    with closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as db:
        return db.execute("SELECT max(received) FROM session").fetchone()[0]


def committed(log: Path) -> int:
    """How many events the log has, of its one session that has any."""
    with closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as db:
        return db.execute("SELECT max(committed) FROM session").fetchone()[0]


def whole(log: Path) -> None:
    """SQLite finds nothing wrong with a log that nobody has open."""
    with closing(sqlite3.connect(log)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def fills_up_and_goes_on(log: Path, fill: Any, relieve: Any) -> None:
    """A log that takes no more: nothing is acknowledged that it lacks; when it does, service resumes."""
    async with served(log) as (url, pid):
        async with by_hand(url) as raw:
            async with Client(gapless.connect(url)) as client:
                await raw.post(1)
                fill(pid)
                refused = await raw.until_refused()
                assert refused["error"]["data"]["reason"] == "storage"
                assert refused["error"]["data"]["retryable"] is True
                call = asyncio.create_task(client.call_tool("climb", {"steps": 3, "delay": 0.0}))
                at_most = raw.acknowledged
                for _ in range(5):
                    assert (await raw.post(at_most + 1))[0] == 503
                assert not call.done()
                relieve(pid)
                await raw.until_accepted()
                async with asyncio.timeout(FAR):
                    answer: Any = await call
                assert answer.content[0].text == "climbed 3 steps"
            acknowledged = raw.acknowledged
    whole(log)
    assert received(log) >= acknowledged


@pytest.mark.rule("L2", "L6")
async def test_a_log_that_may_not_grow_is_told_as_storage_and_service_resumes(tmp_path: Path) -> None:
    """The kernel refuses writes past a size (EFBIG), which is lifted again."""
    log = tmp_path / "log.db"

    def fill(pid: int) -> None:
        size = os.path.getsize(f"{log}-wal")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 64 * 1024, resource.RLIM_INFINITY))

    def relieve(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    await fills_up_and_goes_on(log, fill, relieve)


@contextmanager
def small_disk(path: Path) -> Generator[Path]:
    """A file system of 4 MiB. To mount one takes root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def remount_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@pytest.mark.crash
@pytest.mark.rule("L2", "L6")
async def test_a_full_disk_is_told_as_storage_and_service_resumes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 2 * 2**20)
        await fills_up_and_goes_on(disk / "log.db", lambda _: None, lambda _: ballast.unlink())


@pytest.mark.crash
async def test_a_log_on_a_read_only_file_system_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        log = disk / "log.db"
        async with served(log) as (url, _), by_hand(url) as raw:
            await raw.post(1)
        remount_read_only(disk)
        code, said = await starts(log)
        one_line(code, said, f"gapless: the log {log} cannot be opened: ")


@pytest.mark.rule("L2")
async def test_nothing_is_acknowledged_once_the_log_is_removed(tmp_path: Path) -> None:
    """SQLite would go on writing to a file that no restart will find."""
    log = tmp_path / "log.db"
    async with served(log) as (url, _), by_hand(url) as raw:
        assert (await raw.post(1))[0] == 202
        log.unlink()
        status, body = await raw.post(2)
        assert (status, body["error"]["data"]["reason"]) == (503, "storage")
        assert "removed" in body["error"]["message"]


@pytest.mark.rule("L2")
async def test_nothing_is_acknowledged_once_the_log_is_replaced(tmp_path: Path) -> None:
    log, copy = tmp_path / "log.db", tmp_path / "copy.db"
    async with served(log) as (url, _), by_hand(url) as raw:
        assert (await raw.post(1))[0] == 202
        copy.write_bytes(log.read_bytes())
        os.replace(copy, log)
        assert (await raw.post(2))[1]["error"]["data"]["reason"] == "storage"


@pytest.mark.rule("L2", "C5")
async def test_a_damaged_page_costs_the_sessions_on_it_and_no_others(tmp_path: Path) -> None:
    """After a restart. Who asks for a session that cannot be read is told `storage`, as often as it asks."""
    log = tmp_path / "log.db"
    async with served(log) as (url, _), by_hand(url) as raw:
        for number in range(1, 200):
            await raw.post(number)
        session = raw.session
    assert committed(log) >= 100
    with closing(sqlite3.connect(log)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'segment'").fetchone()
    pages = bytearray(log.read_bytes())
    pages[(root - 1) * 4096 : root * 4096] = b"\xff" * 4096  # the root of the tree of events
    log.write_bytes(pages)
    check = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gapless", "log", "check", f"sqlite:///{log}", stdout=subprocess.PIPE
    )
    await check.communicate()
    assert check.returncode == 1
    async with served(log) as (url, _), httpx2.AsyncClient(timeout=FAR) as http:
        events = {"Accept": "text/event-stream", "Last-Event-ID": "0"}
        for _ in range(2):
            answer = await http.get(f"{url}/session/{session}/events", headers=events)
            assert (answer.status_code, answer.json()["error"]["data"]["reason"]) == (503, "storage")


def one_line(code: int | None, said: str, begins: str) -> None:
    assert code == 1
    assert said.startswith(begins), said
    assert said.count("\n") == 1, said


async def starts(log: Path) -> tuple[int | None, str]:
    """How `gapless serve` ends on a log on which it cannot begin, and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gapless", "serve", "--port", "0", "--log", f"sqlite:///{log}", LADDER),
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(FAR):
        _, said = await process.communicate()
    return process.returncode, said.decode()


async def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    async with served(log) as (url, _), by_hand(url) as raw:
        await raw.post(1)
    truncated, foreign, orphan = tmp_path / "truncated.db", tmp_path / "foreign.db", tmp_path / "orphan.db"
    truncated.write_bytes(log.read_bytes()[:5000])
    foreign.write_bytes(b"this is no log" * 1000)
    orphan.with_name("orphan.db-wal").write_bytes(b"x" * 5000)
    for path in (truncated, foreign, orphan):
        code, said = await starts(path)
        one_line(code, said, f"gapless: the log {path} ")
