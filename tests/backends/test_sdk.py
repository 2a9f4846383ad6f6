"""In-process servers of the official SDK: both eras, one lifespan, and an answer to every request."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.server import MCPServer, Server
from mcp.server.mcpserver import Context
from mcp.shared.message import SessionMessage
from mcp_types import ElicitResult, TextContent, jsonrpc_message_adapter

from examples import ladder_server
from gapless.backends import open_backends, sdk
from gapless.backends.base import Backend, BackendFactory
from gapless.backends.sdk import SdkBackends
from gapless.errors import BackendError, UsageError
from gapless.protocol.jsonrpc import Envelope, RequestId, peek
from tests.backends.conftest import Recorder, soon
from tests.server.harness import Uvicorn, listening

Open = Callable[..., Awaitable[Backend]]

LADDER = str(Path(ladder_server.__file__))


# --- raw sessions -----------------------------------------------------------------------


@pytest.fixture
async def open(sink: Recorder) -> AsyncIterator[Open]:
    """Opens sessions, initialized and on `sink` by default; closes them and what they share."""
    opened: list[Backend] = []
    factories: list[SdkBackends] = []

    async def open(server: object, sink: Recorder = sink) -> Backend:
        backends = SdkBackends(server)
        factories.append(backends)
        await soon(backends.start())
        backend = await soon(backends.open(sink))
        opened.append(backend)
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {"elicitation": {"form": {}}},
            "clientInfo": {"name": "t", "version": "1"},
        }
        await send(backend, id="hello", method="initialize", params=params)
        assert (await sink.next())["id"] == "hello"
        await send(backend, method="notifications/initialized")
        return backend

    yield open
    for backend in opened:
        await soon(backend.close())
    for backends in factories:
        await soon(backends.close())


async def send(backend: Backend, **message: Any) -> None:
    data = json.dumps({"jsonrpc": "2.0", **message}).encode()
    await soon(backend.send(data, peek(data)))


async def call(
    backend: Backend, id: RequestId, tool: str, token: RequestId | None = None, **arguments: Any
) -> None:
    params: dict[str, Any] = {"name": tool, "arguments": arguments}
    if token is not None:
        params["_meta"] = {"progressToken": token}
    await send(backend, id=id, method="tools/call", params=params)


async def answers(backend: Backend, sink: Recorder) -> None:
    """It still works."""
    await send(backend, id="still there?", method="ping")
    assert await sink.next() == {"jsonrpc": "2.0", "id": "still there?", "result": {}}


@pytest.fixture
def server() -> MCPServer:
    """A server whose tools do what tools must not."""
    server = MCPServer("wild")

    class Crash(BaseException):
        pass

    @server.tool()
    async def crash() -> None:
        raise Crash("off the ladder")

    @server.tool()
    async def stray() -> None:
        raise asyncio.CancelledError

    @server.tool()
    async def surrogate() -> str:
        return "\ud800"

    @server.tool()
    async def ask_badly(ctx: Context) -> str:
        try:
            await ctx.elicit("\ud800", ladder_server.Height)
        except Exception as error:
            return str(error)
        return "answered"

    @server.tool()
    async def ask(ctx: Context) -> str:
        try:
            await ctx.elicit("how high?", ladder_server.Height)
        except Exception as error:
            return str(error)
        return "answered"

    @server.tool()
    async def wait() -> None:
        await asyncio.Event().wait()

    return server


@pytest.mark.parametrize("id", [5, "5"])
async def test_what_a_tool_says_meanwhile_is_related_to_its_request(
    open: Open, sink: Recorder, id: RequestId
) -> None:  # M1
    backend = await open(ladder_server.server)
    await call(backend, id, "climb", token="t", steps=2, delay=0)
    for step in (1, 2):
        message, related = await sink.next_related()
        assert message["params"] == {
            "progressToken": "t",
            "progress": step,
            "total": 2,
            "message": f"step {step}",
        }
        assert related == id
    message, related = await sink.next_related()
    assert (message["id"], related) == (id, None)


async def test_a_question_to_the_user_is_related_to_its_request(open: Open, sink: Recorder) -> None:  # M1
    backend = await open(ladder_server.server)
    await call(backend, 5, "ask")
    question, related = await sink.next_related()
    assert (question["method"], related) == ("elicitation/create", 5)
    await send(backend, id=question["id"], result={"action": "accept", "content": {"metres": 3}})
    assert (await sink.next())["result"]["content"][0]["text"] == "a ladder of 3 m"


async def test_a_list_change_is_related_to_no_request(open: Open, sink: Recorder) -> None:  # M1
    backend = await open(ladder_server.server)
    await call(backend, 5, "grow", name="left")
    message, related = await sink.next_related()
    assert (message["method"], related) == ("notifications/tools/list_changed", None)


async def test_sessions_of_one_server_do_not_hear_each_other(open: Open, sink: Recorder) -> None:
    other_sink = Recorder()
    backends = SdkBackends(ladder_server.server)
    await backends.start()
    one, other = await backends.open(sink), await backends.open(other_sink)
    for backend in (one, other):
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        }
        await send(backend, id=1, method="initialize", params=params)
    assert (await sink.next())["id"] == (await other_sink.next())["id"] == 1
    await call(one, 2, "grow", name="right")
    assert [(await sink.next()).get("id") for _ in range(2)] == [None, 2]
    await one.close()
    await answers(other, other_sink)
    await other.close()
    await backends.close()


# --- every request is answered ----------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "code"),
    [
        pytest.param("[1]", -32602, id="a list"),
        pytest.param('{"a":' + "[" * 400 + "]" * 400 + "}", -32600, id="nested deeper than the SDK reads"),
    ],
)
async def test_a_request_that_the_sdk_cannot_read_is_answered(
    open: Open, sink: Recorder, params: str, code: int
) -> None:  # L7
    backend = await open(ladder_server.server)
    data = f'{{"jsonrpc":"2.0","id":"5","method":"tools/list","params":{params}}}'.encode()
    await soon(backend.send(data, peek(data)))
    error = await sink.next()
    assert (error["id"], error["error"]["code"]) == ("5", code)
    await answers(backend, sink)


async def test_a_notification_that_the_sdk_cannot_read_is_dropped(
    open: Open, sink: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = await open(ladder_server.server)
    await send(backend, method="notifications/whatever", params=[1])
    await answers(backend, sink)
    assert "dropped" in caplog.text


async def test_a_client_s_answer_that_the_sdk_cannot_read_fails_the_server_s_request(
    open: Open, sink: Recorder, server: MCPServer
) -> None:
    backend = await open(server)
    await call(backend, 5, "ask")
    await send(backend, id=(await sink.next())["id"], result=3)
    assert "unusable answer of the client" in (await sink.next())["result"]["content"][0]["text"]


async def test_a_result_that_is_no_json_becomes_an_error_under_its_id(
    open: Open, sink: Recorder, server: MCPServer
) -> None:  # W4
    backend = await open(server)
    await call(backend, 5, "surrogate")
    error = await sink.next()
    assert (error["id"], error["error"]["code"]) == (5, -32603)
    await answers(backend, sink)


async def test_a_request_of_the_server_that_is_no_json_fails(
    open: Open, sink: Recorder, server: MCPServer
) -> None:  # W4
    backend = await open(server)
    await call(backend, 5, "ask_badly")
    result = await sink.next()
    assert result["id"] == 5
    assert "unusable request" in result["result"]["content"][0]["text"]


# --- how it ends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "said"), [("crash", "failed: Crash: off the ladder"), ("stray", "'wild' ended")]
)
async def test_what_escapes_a_session_s_loop_is_told_once(
    open: Open, sink: Recorder, server: MCPServer, tool: str, said: str
) -> None:
    backend = await open(server)
    await call(backend, 5, tool)
    assert said in await sink.loss()
    with pytest.raises(BackendError):
        await send(backend, id=6, method="ping")
    await soon(backend.close())
    assert len(sink.losses) == 1


async def test_closing_cancels_what_runs_and_emits_nothing_more(
    open: Open, sink: Recorder, server: MCPServer
) -> None:
    backend = await open(server)
    await call(backend, 5, "wait")
    seen = len(sink.emitted)
    await soon(asyncio.gather(backend.close(), backend.close()))
    await soon(backend.close())
    assert (len(sink.emitted), sink.losses) == (seen, [])
    with pytest.raises(BackendError):
        await send(backend, id=6, method="ping")
    with pytest.raises(BackendError):
        await send(backend, id=7, method="ping", params=[1])


async def test_closing_ends_a_session_that_hangs_in_its_handshake(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdk, "_GRACE", 0.1)
    hanging = asyncio.Event()

    async def hang(ctx: object, call_next: object) -> dict[str, Any]:
        hanging.set()
        await asyncio.Event().wait()
        return {}

    backends = SdkBackends(MCPServer("slow", middleware=[hang]))
    await backends.start()
    backend = await backends.open(sink)
    await send(backend, id=1, method="initialize")
    await soon(hanging.wait())
    await soon(backend.close())
    await backends.close()
    assert not caplog.records


async def test_closing_does_not_wait_for_a_thread(
    open: Open, server: MCPServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdk, "_GRACE", 0.01)
    entered, leave, left = asyncio.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @server.tool()
    def block() -> None:
        loop.call_soon_threadsafe(entered.set)
        leave.wait(20)
        loop.call_soon_threadsafe(left.set)

    backend = await open(server)
    await call(backend, 5, "block")
    await soon(entered.wait())
    await soon(backend.close())
    assert "still runs" in caplog.text
    leave.set()
    await soon(left.wait())


async def test_plain_messages_are_handed_over_in_runs_and_everything_in_order() -> None:
    handed: list[tuple[RequestId | None, list[bytes]]] = []
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Sink:
        def emit(
            self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
        ) -> Awaitable[None] | None:
            handed.append((related, [data, *more]))
            return room if related == 3 else None

        async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
            raise AssertionError(message)

    def said(n: int) -> bytes:
        return b'{"jsonrpc":"2.0","method":"notifications/message","params":{"n":%d}}' % n

    answer = b'{"jsonrpc":"2.0","id":1,"result":{}}'
    runs = sdk._Runs(Sink())
    for data, related in [(said(1), 1), (said(2), 1), (said(3), 2), (answer, None), (said(4), None)]:
        runs.add(data, peek(data), related)
    assert handed == [(1, [said(1), said(2)]), (2, [said(3)]), (None, [answer])]
    await asyncio.sleep(0)  # the loop's next turn
    assert handed[3:] == [(None, [said(4)])]
    assert not runs.full
    runs.add(said(5), peek(said(5)), 3)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(runs.room())
    await asyncio.sleep(0)
    assert runs.full
    assert not waiting.done()
    waiting.cancel()  # which takes nothing down that others wait for
    await asyncio.wait({waiting})
    room.set_result(None)
    await soon(runs.room())
    runs.add(said(6), peek(said(6)), None)
    runs.drop()
    await asyncio.sleep(0)
    assert len(handed) == 5


@pytest.mark.parametrize("moment", ["emit", "lost"])
async def test_the_sink_may_close_the_backend_from_within(
    open: Open, server: MCPServer, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    closed = asyncio.Event()
    opened: list[Backend] = []
    closing: list[asyncio.Task[None]] = []

    class Closer(Recorder):
        async def emit(
            self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
        ) -> None:
            await super().emit(data, envelope, related, more)
            if moment == "emit" and opened:  # not waited for: it is a handler that emits
                closing.append(asyncio.create_task(opened[0].close()))
                closing[0].add_done_callback(lambda _: closed.set())

        async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
            await super().lost(message)
            await opened[0].close()
            closed.set()

    sink = Closer()
    opened.append(await open(server, sink))
    await call(opened[0], 4, "wait")
    await call(opened[0], 5, "surrogate" if moment == "emit" else "crash")
    await soon(closed.wait())
    assert len(sink.losses) == (moment == "lost")
    assert "gave up" not in caplog.text  # as handlers do that write where nobody reads


async def test_a_cancelled_request_does_not_take_the_sink_down_with_it(open: Open, sink: Recorder) -> None:
    backend = await open(ladder_server.server)
    sink.gate.clear()
    await call(backend, 5, "climb", token=1, steps=3, delay=0)
    await sink.next()
    await send(backend, method="notifications/cancelled", params={"requestId": 5})
    await send(backend, id=6, method="ping")
    sink.gate.set()
    rest = [await sink.next()]
    while rest[-1].get("id") != 6:
        rest.append(await sink.next())
    assert 5 not in [message.get("id") for message in rest]  # M8


# --- what sessions share ----------------------------------------------------------------


class Lifespan:
    """Counts; and would not let itself be left by another task than it was entered by."""

    def __init__(self) -> None:
        self.entered = self.left = 0

    @asynccontextmanager
    async def __call__(self, server: object) -> AsyncIterator[Lifespan]:
        async with anyio.create_task_group() as group:
            self.entered += 1
            yield self
            self.left += 1
            group.cancel_scope.cancel()


async def lifespan_seen(ctx: Context[Any, Any]) -> str:
    lifespan = ctx.request_context.lifespan_context
    return f"entered {lifespan.entered} left {lifespan.left}"


async def test_the_lifespan_is_entered_once_for_all_sessions_and_left_from_any_task() -> None:
    lifespan = Lifespan()
    server = MCPServer("shared", lifespan=lifespan)
    server.add_tool(lifespan_seen)
    backends = SdkBackends(server)
    await asyncio.create_task(backends.start())
    for mode in ("legacy", "2026-07-28", "auto"):
        async with Client(Wire(backends), mode=mode) as client:
            assert text(await soon(client.call_tool("lifespan_seen"))) == "entered 1 left 0"
    await soon(asyncio.create_task(backends.close()))
    await soon(backends.close())
    assert (lifespan.entered, lifespan.left) == (1, 1)
    with pytest.raises(BackendError, match="not running"):
        await backends.open(Recorder())


async def test_backends_start_once(sink: Recorder) -> None:
    backends = SdkBackends(Server("low"))
    with pytest.raises(BackendError, match="not running"):
        await backends.open(sink)
    await backends.close()
    await backends.start()
    with pytest.raises(UsageError, match="started before"):
        await backends.start()
    await backends.close()


async def test_a_lifespan_that_fails_fails_the_start_which_may_be_tried_again() -> None:
    failures = ["no database"]

    @asynccontextmanager
    async def lifespan(server: object) -> AsyncIterator[None]:
        if failures:
            raise OSError(failures.pop())
        yield

    backends = SdkBackends(Server("low", lifespan=lifespan))
    with pytest.raises(OSError, match="no database"):
        await backends.start()
    await backends.start()
    await backends.close()


def test_an_mcp_server_has_a_low_level_one() -> None:
    # A private attribute of the SDK: where it goes, `SdkBackends` must look elsewhere.
    assert isinstance(MCPServer("a")._lowlevel_server, Server)


def test_a_fastmcp_has_a_low_level_one() -> None:
    class FastMCP:
        """As FastMCP 4 is built, which is not installed here."""

        def __init__(self) -> None:
            self._mcp_server = Server[Any]("a")

    SdkBackends(FastMCP())


# --- the SDK's own client, against both kinds of server ---------------------------------


class Wire(AbstractAsyncContextManager[Any]):
    """The SDK's idea of a transport, on a backend."""

    def __init__(self, backends: BackendFactory) -> None:
        self._backends = backends

    async def __aenter__(self) -> Any:
        self._to_client, read = anyio.create_memory_object_stream[SessionMessage | Exception]()
        write, self._from_client = anyio.create_memory_object_stream[SessionMessage]()
        self._backend = await self._backends.open(self)
        self._sending = asyncio.create_task(self._send())
        self._ours = (read, write)
        return self._ours

    async def _send(self) -> None:
        async for message in self._from_client:
            data = message.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
            await self._backend.send(data, peek(data))

    async def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> None:
        await self._to_client.send(SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False)))

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        self._to_client.close()

    async def __aexit__(self, *_: object) -> None:
        await soon(self._backend.close())
        self._sending.cancel()
        for stream in (*self._ours, self._to_client, self._from_client):
            stream.close()


def text(result: Any) -> str:
    assert not result.is_error
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


@pytest.fixture(params=["in-process", "stdio", "upstream"])
async def ladder(request: pytest.FixtureRequest) -> AsyncIterator[BackendFactory]:
    async with AsyncExitStack() as after:
        match request.param:
            case "in-process":
                target: Any = "examples.ladder_server:server"
            case "stdio":
                target = [sys.executable, LADDER]
            case _:
                sock = listening()
                target = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
                upstream = Uvicorn(ladder_server.server.streamable_http_app(), sock)
                await upstream.start()
                after.push_async_callback(upstream.stop)
        backends = open_backends(target)
        await backends.start()
        yield backends
        await backends.close()


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_ladder_server_works_in_both_eras(ladder: BackendFactory, mode: str) -> None:
    asked: list[str] = []
    steps: list[str | None] = []

    async def answer(context: object, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"metres": 3})

    async def step(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    async with Client(Wire(ladder), mode=mode, elicitation_callback=answer) as client:
        climbed = await soon(client.call_tool("climb", {"steps": 3, "delay": 0}, progress_callback=step))
        assert text(climbed) == "climbed 3 steps"
        assert steps == ["step 1", "step 2", "step 3"]

        assert text(await soon(client.call_tool("ask"))) == "a ladder of 3 m"
        assert asked == ["How high shall the ladder be, in metres?"]

        name = f"rung-{mode}"
        assert text(await soon(client.call_tool("grow", {"name": name}))) == f"grew {name}"
        assert name in [tool.name for tool in (await soon(client.list_tools())).tools]
        assert text(await soon(client.call_tool(name))) == f"standing on {name}"


async def test_list_changes_reach_the_handshake_era_unasked(ladder: BackendFactory) -> None:
    told = asyncio.Event()

    async def hear(message: Any) -> None:
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            told.set()

    async with Client(Wire(ladder), mode="legacy", message_handler=hear) as client:
        await soon(client.call_tool("grow", {"name": "first"}))
        await soon(told.wait())


async def test_list_changes_reach_the_subscriptions_of_2026_07_28(ladder: BackendFactory) -> None:
    async with Client(Wire(ladder)) as client, client.listen(tools_list_changed=True) as changes:
        await soon(client.call_tool("grow", {"name": "second"}))
        assert type(await soon(anext(aiter(changes)))).__name__ == "ToolsListChanged"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_declining_the_question_is_an_answer_too(mode: str) -> None:
    async def decline(context: object, params: Any) -> ElicitResult:
        return ElicitResult(action="decline")

    backends = SdkBackends(ladder_server.server)
    await backends.start()
    async with Client(Wire(backends), mode=mode, elicitation_callback=decline) as client:
        assert text(await soon(client.call_tool("ask"))) == "no ladder"
    await backends.close()
