"""Clients through Gapless to real Streamable HTTP servers, which restart, and whose connections break."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from mcp import Client, MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from pydantic import Field

import gapless
from gapless.torture.faults import FaultProxy
from tests.interop.fixture_server import Events
from tests.real.serving import proxied, served
from tests.server.harness import Uvicorn, listening, soon


class Upstream:
    """A server of the official SDK with its own Streamable HTTP, and what became of its calls."""

    def __init__(self) -> None:
        self.server = MCPServer("upstream")
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.go_on = asyncio.Event()
        self._running: Uvicorn | None = None

        @self.server.tool()
        async def wait(ctx: Context, name: str) -> str:
            """Report one step, wait, report another."""
            self.begun.append(name)
            try:
                await ctx.report_progress(1, 2)
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            await ctx.report_progress(2, 2)
            return f"{name} has waited"

        @self.server.tool()
        async def route(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
            """Be routed by a header."""
            return region

        sock = listening()
        self.port: int = sock.getsockname()[1]
        sock.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self, events: Events | None = None) -> None:
        """Listen, with no session in memory; with `events`, with streams that can be resumed."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        app = self.server.streamable_http_app(event_store=events, retry_interval=20)
        self._running = Uvicorn(app, sock)
        await self._running.start()

    async def stop(self) -> None:
        """Be gone, and every connection with it."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.stop()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.go_on.set()
    await upstream.stop()


@asynccontextmanager
async def through(url: str, mode: str, **options: Any) -> AsyncGenerator[tuple[Client, list[str]]]:
    """A client of a Gapless in front of `url`, and which changes it was told of."""
    told: list[str] = []

    async def hear(message: Any) -> None:
        told.append(getattr(message, "method", ""))

    async with (
        served(backend=url) as (ours, _),
        Client(gapless.connect(ours), mode=mode, message_handler=hear, **options) as client,
    ):
        yield client, told


def text(result: Any) -> str:
    assert not result.is_error, result
    return result.content[0].text


class Steps:
    """What progress was reported."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.first = asyncio.Event()

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.seen.append(progress)
        self.first.set()


def cut(proxy: FaultProxy) -> None:
    """Reset every connection that is up."""
    for link in proxy.links:
        link.reset()


@pytest.mark.rule("N2", "L7")
async def test_an_upstream_that_was_restarted_is_shaken_hands_with_anew_and_its_client_goes_on(
    upstream: Upstream,
) -> None:
    await upstream.start()
    async with through(upstream.url, "legacy") as (client, told):
        assert text(await soon(client.call_tool("route", {"region": "a"}))) == "a"
        await upstream.stop()
        await upstream.start()
        # It is refused for want of a session, so it certainly did not run: nobody has to call again.
        assert text(await soon(client.call_tool("route", {"region": "b"}))) == "b"
        assert "notifications/tools/list_changed" in told


async def test_a_call_whose_connection_breaks_is_resumed_where_the_upstream_keeps_events(
    upstream: Upstream,
) -> None:
    await upstream.start(Events())
    steps = Steps()
    async with proxied(upstream.url) as (url, proxy), through(url, "legacy") as (client, _):
        calling = asyncio.create_task(client.call_tool("wait", {"name": "a"}, progress_callback=steps))
        await soon(steps.first.wait())
        cut(proxy)
        upstream.go_on.set()
        assert text(await soon(calling)) == "a has waited"
    assert steps.seen == [1, 2]
    assert upstream.begun == ["a"]


async def test_calls_through_two_gapless_lose_nothing_however_often_the_connection_between_them_breaks() -> (
    None
):
    climbs: dict[int, list[float]] = {1: [], 2: []}

    async with (
        served(retry=0.02) as (behind, _),
        proxied(behind) as (between, proxy),
        through(between, "legacy") as (client, _),
    ):

        async def climb(number: int) -> str:
            async def step(progress: float, total: float | None, message: str | None) -> None:
                climbs[number].append(progress)
                if progress % 7 == number:
                    cut(proxy)

            arguments = {"steps": 40, "delay": 0.01}
            return text(await client.call_tool("climb", arguments, progress_callback=step))

        assert await soon(asyncio.gather(climb(1), climb(2)), 30) == ["climbed 40 steps"] * 2
    assert climbs == {1: list(range(1, 41)), 2: list(range(1, 41))}


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_call_whose_connection_breaks_for_good_ends_outcome_unknown_and_the_next_one_runs(
    upstream: Upstream, mode: str
) -> None:
    await upstream.start()
    steps = Steps()
    async with proxied(upstream.url) as (url, proxy), through(url, mode) as (client, _):
        calling = asyncio.create_task(client.call_tool("wait", {"name": "a"}, progress_callback=steps))
        await soon(steps.first.wait())
        cut(proxy)
        with pytest.raises(MCPError, match="the outcome is unknown") as error:
            await soon(calling)
        assert error.value.error.data == {"reason": "outcome-unknown"}
        upstream.go_on.set()
        assert text(await soon(client.call_tool("wait", {"name": "b"}))) == "b has waited"
    assert upstream.begun == ["a", "b"]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_cancellation_reaches_the_tool(upstream: Upstream, mode: str) -> None:
    await upstream.start()
    steps = Steps()
    async with through(upstream.url, mode) as (client, _):
        calling = asyncio.create_task(client.call_tool("wait", {"name": "a"}, progress_callback=steps))
        await soon(steps.first.wait())
        calling.cancel()
        await asyncio.wait({calling})
        assert text(await soon(client.call_tool("route", {"region": "b"}))) == "b"
    assert upstream.cancelled == ["a"]


async def test_an_argument_that_is_wanted_in_a_header_is_there_whoever_has_listed_the_tools(
    upstream: Upstream,
) -> None:
    await upstream.start()
    async with served(backend=upstream.url) as (ours, _):
        async with Client(gapless.connect(ours), mode="auto") as client:
            await soon(client.list_tools())
            assert text(await soon(client.call_tool("route", {"region": "Köln"}))) == "Köln"
        async with Client(gapless.connect(ours), mode="auto") as client:
            assert text(await soon(client.call_tool("route", {"region": "b"}))) == "b"


async def test_an_upstream_that_is_away_is_told_as_that_and_the_session_goes_on(upstream: Upstream) -> None:
    await upstream.start()
    async with through(upstream.url, "legacy") as (client, _):
        await upstream.stop()
        with pytest.raises(MCPError, match="cannot be reached"):
            await soon(client.call_tool("route", {"region": "a"}))
        await upstream.start()
        assert text(await soon(client.call_tool("route", {"region": "b"}))) == "b"
