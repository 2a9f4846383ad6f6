"""Gapless behind the real nginx, with the settings that docs/how-to/run-behind-a-proxy.md shows.

They belong to `make interop`, for they need nginx (Debian: `apt-get install nginx-light`).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult

import gapless
from gapless.cli.target import serving
from gapless.client.transport import Connection
from gapless.protocol.settings import Limits

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "run-behind-a-proxy.md"
BLOCKS = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SITE, SHUTDOWN, PROCESSES = (
    next(block for block in BLOCKS if word in block)
    for word in ("server_name", "worker_shutdown", "upstream ")
)
LADDER = "examples.ladder_server:server"
PATIENCE = 30.0

through_nginx = pytest.mark.interop


def changed(text: str, *changes: tuple[str, str]) -> str:
    """`text` with these changes, each of which must have something to change."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def bytes_of(setting: str) -> int:
    """What `client_max_body_size` says."""
    (number,) = re.findall(rf"{setting} (\d+)m;", SITE)
    return int(number) * 1024 * 1024


def test_the_page_lets_pass_what_gapless_does_by_default() -> None:
    limits = Limits()
    (timeout,) = re.findall(r"proxy_read_timeout (\d+)s;", SITE)
    assert int(timeout) > 2 * limits.keepalive
    assert bytes_of("client_max_body_size") > limits.max_message_bytes + 1024


@dataclass
class Nginx:
    """The real one, run with a site: to be reloaded, or killed and started again."""

    folder: Path
    port: int
    process: Process | None = None

    @property
    def url(self) -> str:
        """Of what is behind it."""
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        """Run it until it accepts connections."""
        program = shutil.which("nginx", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin")
        assert program, "nginx is not installed; on Debian: apt-get install nginx-light"
        words = ["-p", str(self.folder), "-c", "nginx.conf", "-e", "error.log", "-g", "daemon off;"]
        self.process = await asyncio.create_subprocess_exec(program, *words)
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                assert self.process.returncode is None, (self.folder / "error.log").read_text()
                await asyncio.sleep(0.05)

    def reload(self) -> None:
        """What `nginx -s reload` does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """End it at once, with all its connections."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


@asynccontextmanager
async def nginx(
    folder: Path, served: str, *changes: tuple[str, str], main: str = "", http: str = ""
) -> AsyncGenerator[Nginx]:
    """nginx with the site of the page in front of what is served there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = served.removesuffix("/mcp")
    site = changed(
        SITE, *changes, ("listen 80;", f"listen 127.0.0.1:{port};"), ("http://127.0.0.1:8000", behind)
    )
    kept = "\n".join(
        f"{kind}_temp_path {kind}_temp;" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # As Debian has it around a site: compressing, and with an access log.
    (folder / "nginx.conf").write_text(
        f"user {getuser()};\nworker_processes 1;\npid nginx.pid;\n{main}\nevents {{}}\n"
        f"http {{\n{kept}\naccess_log access.log;\ngzip on;\n{http}\n{site}\n}}\n"
    )
    it = Nginx(folder, port)
    try:
        await it.start()
        yield it
    finally:
        await it.stop()


@dataclass
class Call:
    """A call of `climb`, and what becomes of it.

    Attributes:
        turns: what the client's connection went through.
        steps: the progress that the application saw.
        third: set with the third step.
    """

    connection: Connection | str
    turns: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    third: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)

    async def _progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.steps.append(int(progress))
        if progress == 3:
            self.third.set()

    async def _answer(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return ElicitResult(action="accept", content={"metres": 3})

    async def run(self, tool: str, arguments: dict[str, Any], mode: str = "auto") -> str:
        async with asyncio.timeout(PATIENCE):
            async with Client(self.connection, mode=mode, elicitation_callback=self._answer) as client:
                result = await client.call_tool(tool, arguments, progress_callback=self._progress)
        return getattr(result.content[0], "text", "")


def ours(url: str, **options: Any) -> Call:
    """A call by our client."""
    call = Call(url)
    call.connection = gapless.connect(url, observe=lambda seen: call.turns.append(seen.what), **options)
    return call


@through_nginx
@pytest.mark.parametrize("steps", [1, 2])
async def test_the_door_is_passed_in_one_step_and_in_two(tmp_path: Path, steps: int) -> None:
    async with serving(("--log", "memory:", LADDER)) as (url, _), nginx(tmp_path, url) as proxy:
        call = ours(proxy.url, upgrade="require", steps=steps)
        assert await call.run("climb", {"steps": 5}) == "climbed 5 steps"
    assert call.steps == [1, 2, 3, 4, 5]
    assert "bridging → bound" in call.turns
    assert ("streaming → negotiating" in call.turns) == (steps == 2)


@through_nginx
@pytest.mark.parametrize("view", ["session", "stream"])
async def test_an_event_stream_is_not_held(tmp_path: Path, view: str) -> None:
    async with serving(("--log", "memory:", LADDER)) as (url, _), nginx(tmp_path, url) as proxy:
        call = ours(proxy.url, upgrade="never") if view == "session" else Call(proxy.url)
        # The question comes while the call runs: were it held, nobody would answer.
        assert await call.run("ask", {}, mode="legacy") == "a ladder of 3 m"
    assert len(call.asked) == 1


@through_nginx
async def test_without_the_lines_for_it_the_door_is_shut_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = [
        ("proxy_set_header Upgrade $http_upgrade;", ""),
        ("proxy_set_header Connection $connection_upgrade;", ""),
    ]
    async with serving(("--log", "memory:", LADDER)) as (url, _), nginx(tmp_path, url, *lines) as proxy:
        call = ours(proxy.url)
        assert await call.run("climb", {"steps": 5}) == "climbed 5 steps"
    assert call.steps == [1, 2, 3, 4, 5]
    assert "knocking → streaming (426 upgrade-unavailable)" in call.turns


@through_nginx
@pytest.mark.parametrize("upgrade", ["never", "auto"])
@pytest.mark.parametrize("keepalive", ["0.4", "15"])
async def test_a_silent_call_is_cut_unless_the_keep_alive_is_below_the_read_timeout(
    tmp_path: Path, upgrade: str, keepalive: str
) -> None:
    short = ("proxy_read_timeout 60s", "proxy_read_timeout 2s")
    async with (
        serving(("--log", "memory:", "--keepalive", keepalive, LADDER)) as (url, _),
        nginx(tmp_path, url, short) as proxy,
    ):
        call = ours(proxy.url, upgrade=upgrade)
        assert await call.run("climb", {"steps": 1, "delay": 5}) == "climbed 1 steps"
    assert call.steps == [1]
    assert any("→ resting" in turn for turn in call.turns) == (keepalive == "15")


@through_nginx
@pytest.mark.parametrize("upgrade", ["never", "auto"])
async def test_a_reload_cuts_once_its_limit_is_over_and_the_client_resumes(
    tmp_path: Path, upgrade: str
) -> None:
    limit = changed(SHUTDOWN, ("10s", "1s"))
    async with (
        serving(("--log", "memory:", LADDER)) as (url, _),
        nginx(tmp_path, url, main=limit) as proxy,
    ):
        call = ours(proxy.url, upgrade=upgrade)
        running = asyncio.create_task(call.run("climb", {"steps": 20, "delay": 0.2}))
        await asyncio.wait_for(call.third.wait(), PATIENCE)
        proxy.reload()
        assert await running == "climbed 20 steps"
    assert call.steps == list(range(1, 21))
    assert any("→ resting" in turn for turn in call.turns)


@through_nginx
@pytest.mark.parametrize("upgrade", ["never", "auto"])
async def test_a_client_resumes_once_a_proxy_that_died_is_back(tmp_path: Path, upgrade: str) -> None:
    async with serving(("--log", "memory:", LADDER)) as (url, _), nginx(tmp_path, url) as proxy:
        call = ours(proxy.url, upgrade=upgrade)
        running = asyncio.create_task(call.run("climb", {"steps": 20, "delay": 0.1}))
        await asyncio.wait_for(call.third.wait(), PATIENCE)
        await proxy.stop()
        await proxy.start()
        assert await running == "climbed 20 steps"
    assert call.steps == list(range(1, 21))
    assert any("→ resting" in turn for turn in call.turns)


@through_nginx
async def test_the_largest_message_passes_and_one_that_nginx_refuses_fails_alone(tmp_path: Path) -> None:
    most = Limits().max_message_bytes

    async def climb(url: str, size: int) -> tuple[str, str]:
        # By POSTs alone: what goes over a socket has no limit of nginx's.
        async with Client(gapless.connect(url, upgrade="never")) as client:
            try:
                await client.call_tool("climb", {"steps": 1, "pad": "." * size})
                told = ""
            except MCPError as error:
                told = error.data["reason"]
            return told, getattr((await client.call_tool("climb", {"steps": 2})).content[0], "text", "")

    small = ("client_max_body_size 5m;", "")
    async with serving(("--log", "memory:", LADDER)) as (url, _):
        async with nginx(tmp_path, url) as proxy, asyncio.timeout(PATIENCE):
            assert await climb(proxy.url, most - 1024) == ("", "climbed 2 steps")
        async with nginx(tmp_path, url, small) as proxy, asyncio.timeout(PATIENCE):
            assert await climb(proxy.url, most - 1024) == ("too-large", "climbed 2 steps")


@through_nginx
async def test_gapless_sees_whom_a_client_meant_to_call(tmp_path: Path) -> None:
    named = ("--allowed-host", "tools.example.com", "--allowed-origin", "https://app.example.com")
    async with serving(("--log", "memory:", *named, LADDER)) as (url, _):
        async with nginx(tmp_path, url) as proxy, httpx2.AsyncClient(trust_env=False) as client:

            async def status(**headers: str) -> int:
                return (await client.post(f"{proxy.url}/session", headers=headers)).status_code

            assert await status(Host="tools.example.com") == 201
            assert await status(Host="other.example.com") == 421
            assert await status(Host="tools.example.com", Origin="https://app.example.com") == 201
            assert await status(Host="tools.example.com", Origin="https://other.example.com") == 403


@through_nginx
@pytest.mark.parametrize("logged", [False, True])
async def test_no_token_comes_into_the_access_log(tmp_path: Path, logged: bool) -> None:
    changes = [("access_log off;", "")] if logged else []
    async with serving(("--log", "memory:", LADDER)) as (url, _):
        async with nginx(tmp_path, url, *changes) as proxy:
            assert await ours(proxy.url).run("climb", {"steps": 1}) == "climbed 1 steps"
    assert ("/mcp/session/" in (tmp_path / "access.log").read_text()) == logged


@through_nginx
@pytest.mark.parametrize("stopped", [0, 1])
async def test_when_one_of_two_processes_is_stopped_the_other_takes_its_sessions(
    tmp_path: Path, stopped: int
) -> None:
    log = ("--log", f"sqlite:///{tmp_path}/log.db", LADDER)
    async with serving(log) as first, serving(log) as second:
        upstream = PROCESSES
        for (url, _), port in zip((first, second), (8000, 8001), strict=True):
            upstream = changed(upstream, (f"127.0.0.1:{port}", urlsplit(url).netloc))
        async with nginx(tmp_path, "http://gapless", http=upstream) as proxy, asyncio.timeout(PATIENCE):
            async with Client(gapless.connect(proxy.url)) as client:
                await client.call_tool("climb", {"steps": 2})
                os.kill((first, second)[stopped][1], signal.SIGTERM)
                for _ in range(5):
                    result = await client.call_tool("climb", {"steps": 2})
                    assert getattr(result.content[0], "text", "") == "climbed 2 steps"
