"""The official SDK's client through our transport, over real sockets, with real faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp import Client, ClientSession, MCPError
from mcp_types import ElicitResult

import gapless
from gapless.errors import UsageError
from gapless.protocol.client import Retry
from gapless.protocol.refusal import Reason
from gapless.torture.faults import Direction, FaultProxy, Link
from tests.real.serving import proxied, served

ERAS = ["legacy", "auto"]


class Climber:
    """Notes the steps a call reports, and lets a test wait for one."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._waiting: list[tuple[int, asyncio.Event]] = []

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.steps.append(int(progress))
        for step, event in self._waiting:
            if self.steps[-1] >= step:
                event.set()

    async def reached(self, step: int) -> None:
        event = asyncio.Event()
        self._waiting.append((step, event))
        await asyncio.wait_for(event.wait(), 20)


def event_links(proxy: FaultProxy) -> list[Link]:
    return [link for link in proxy.links if link.carries_events and link.open]


async def climb(client: Client, climber: Climber, steps: int = 30) -> str:
    arguments = {"steps": steps, "delay": 0.01}
    result = await client.call_tool("climb", arguments, progress_callback=climber)
    return getattr(result.content[0], "text", "")


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("U1", "U2", "U3", "B7")
async def test_a_call_survives_a_cut_on_sse_the_door_and_a_cut_on_the_socket(mode: str, steps: Any) -> None:
    async with served() as (url, _), proxied(url) as (via, proxy):
        connection = gapless.connect(via, upgrade="never", steps=steps)
        climber = Climber()
        async with Client(connection, mode=mode) as client:
            call = asyncio.create_task(climb(client, climber, 60))
            await climber.reached(5)
            for link in event_links(proxy):
                link.reset()
            await climber.reached(15)
            connection.migrate()
            await climber.reached(30)
            assert connection.transport == "websocket"
            for link in event_links(proxy):
                link.reset()
            assert await call == "climbed 60 steps"
            assert climber.steps == list(range(1, 61))
            assert connection.transport == "sse"


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("B3", "U7", "U8", "B6")
async def test_a_lost_101_costs_a_retry_and_never_the_session(steps: Any) -> None:
    async with served(probe_timeout=0.2) as (url, _), proxied(url) as (via, proxy):
        connection = gapless.connect(via, upgrade="never", steps=steps, answer_timeout=1.0)

        def eat(link: Link) -> None:
            if link.upgraded:
                proxy.on_request = None
                link.arm(Direction.TO_CLIENT, b"HTTP/1.1 101", Link.black_hole, before=True)

        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            call = asyncio.create_task(climb(client, climber, 30))
            await climber.reached(5)
            session = connection.session
            proxy.on_request = eat
            connection.migrate()
            assert await call == "climbed 30 steps"
            assert climber.steps == list(range(1, 31))
            assert connection.session == session


@pytest.mark.rule("U3", "U4")
async def test_a_socket_cut_inside_the_gap_loses_nothing() -> None:
    async with served() as (url, _), proxied(url) as (via, proxy):
        connection = gapless.connect(via, upgrade="never")

        def cut(link: Link) -> None:
            if link.upgraded:
                proxy.on_request = None
                link.arm(Direction.TO_CLIENT, b"resume-cursor", Link.reset)

        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            call = asyncio.create_task(climb(client, climber))
            await climber.reached(5)
            proxy.on_request = cut
            connection.migrate()
            assert await call == "climbed 30 steps"
            assert climber.steps == list(range(1, 31))


@pytest.mark.rule("C8", "B6")
async def test_a_half_open_socket_is_noticed_by_silence_and_never_locks_the_client_out() -> None:
    async with served(keepalive=0.2, probe_timeout=0.2) as (url, _), proxied(url) as (via, proxy):
        connection = gapless.connect(via, upgrade="never")
        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            call = asyncio.create_task(climb(client, climber, 50))
            await climber.reached(5)
            connection.migrate()
            await climber.reached(20)
            for link in event_links(proxy):
                link.black_hole()
            assert await call == "climbed 50 steps"
            assert climber.steps == list(range(1, 51))


@pytest.mark.parametrize("mode", ERAS)
async def test_a_question_to_the_user_is_asked_once_and_answered(mode: str) -> None:
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"metres": 3})

    async with served() as (url, _):
        async with Client(gapless.connect(url), mode=mode, elicitation_callback=answer) as client:
            result = await client.call_tool("ask", {})
            assert getattr(result.content[0], "text", "") == "a ladder of 3 m"
    assert len(asked) == 1


async def test_a_changed_tool_list_is_told_to_a_session_of_the_initialize_era() -> None:
    changed = asyncio.Event()

    async def handle(message: Any) -> None:
        if "list_changed" in getattr(message, "method", ""):
            changed.set()

    async with served() as (url, _):
        async with Client(gapless.connect(url), mode="legacy", message_handler=handle) as client:
            await client.call_tool("grow", {"name": "rung_a"})
            await asyncio.wait_for(changed.wait(), 10)
            assert "rung_a" in [tool.name for tool in (await client.list_tools()).tools]


async def test_a_changed_tool_list_is_told_to_a_subscription_of_the_2026_era() -> None:
    async with served() as (url, _):
        async with Client(gapless.connect(url)) as client, client.listen(tools_list_changed=True) as changes:
            await client.call_tool("grow", {"name": "rung_b"})
            await asyncio.wait_for(anext(aiter(changes)), 10)


async def test_a_client_session_takes_the_streams_as_they_are() -> None:
    async with served() as (url, _):
        async with gapless.connect(url) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            tools = await session.list_tools()
            assert "climb" in [tool.name for tool in tools.tools]


@pytest.mark.rule("L7", "B9")
async def test_a_session_ended_by_the_server_answers_what_was_open_with_outcome_unknown() -> None:
    async with served() as (url, app):
        connection = gapless.connect(url)
        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            call = asyncio.create_task(climb(client, climber, 1000))
            await climber.reached(3)
            (live,) = app.sessions.all()
            await live.end(gapless.protocol.refusal.Reason.SESSION_EXPIRED)  # type: ignore[attr-defined]
            with pytest.raises(MCPError) as raised:
                await call
            assert raised.value.error.data["reason"] == "outcome-unknown"
            assert connection.error is not None
            assert connection.error.code == "session-expired"


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("upgrade", ["never", "require"])
async def test_who_leaves_ends_the_session(mode: str, upgrade: Any) -> None:
    async with served() as (url, app):
        async with Client(gapless.connect(url, upgrade=upgrade), mode=mode) as client:
            await client.list_tools()
            (live,) = app.sessions.all()
            assert live.machine.reason is None
        assert live.machine.reason is Reason.SESSION_ENDED


async def test_a_server_that_does_not_answer_does_not_keep_who_leaves() -> None:
    async with served() as (url, app), proxied(url) as (via, proxy):
        async with Client(gapless.connect(via)) as client:
            await client.list_tools()
            (live,) = app.sessions.all()
            proxy.on_request = lambda link: link.black_hole()
        assert live.machine.reason is None


async def test_a_server_that_is_not_there_is_given_up_on_visibly() -> None:
    connection = gapless.connect("http://127.0.0.1:9/mcp", retry=Retry(first=0.01, attempts=2))
    with pytest.raises((MCPError, ExceptionGroup)):
        async with Client(connection, mode="legacy"):
            pass
    assert connection.error is not None
    assert connection.error.code == "gave-up"


@pytest.mark.rule("U6")
async def test_upgrade_require_fails_where_handshakes_are_eaten() -> None:
    async with served() as (url, _), proxied(url) as (via, proxy):

        def strip(link: Link) -> None:
            if link.upgraded:
                link.strip_upgrade()

        proxy.on_request = strip
        connection = gapless.connect(via, upgrade="require")
        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            with pytest.raises(MCPError):
                await climb(client, climber, 1000)
        assert connection.error is not None
        assert connection.error.code == "upgrade-unavailable"


@pytest.mark.rule("U6")
async def test_upgrade_auto_stays_on_sse_where_handshakes_are_eaten() -> None:
    async with served() as (url, _), proxied(url) as (via, proxy):

        def strip(link: Link) -> None:
            if link.upgraded:
                link.strip_upgrade()

        proxy.on_request = strip
        connection = gapless.connect(via)
        climber = Climber()
        async with Client(connection, mode="legacy") as client:
            assert await climb(client, climber) == "climbed 30 steps"
            assert connection.transport == "sse"


@pytest.mark.parametrize(
    "arguments", [{"url": "ftp://x"}, {"url": "127.0.0.1:8000"}, {"url": "http://x", "upgrade": "sometimes"}]
)
def test_connect_says_what_is_wrong_with_its_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        gapless.connect(**arguments)
