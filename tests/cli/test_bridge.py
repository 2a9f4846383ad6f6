"""`gapless bridge`: to a host it is a stdio MCP server; behind it are our client, its resume and its door."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ElicitResult

import gapless
from examples.ladder_server import server as ladder
from gapless.torture.faults import Direction, Link
from tests.cli.harness import LADDER, ROOT, Run, Serve, environment
from tests.cli.host import (
    BRIDGE,
    INITIALIZE,
    INITIALIZED,
    LEAVES_WITHIN,
    Bridged,
    Host,
    World,
    call,
    customized,
    delete,
    memory,
    request,
    soon,
    unread,
)
from tests.real.serving import served
from tests.server.harness import Uvicorn, listening


@pytest.fixture
async def bridge() -> AsyncIterator[Bridged]:
    """Start a bridge; it is ended with the test."""
    async with AsyncExitStack() as undo:

        async def start(*args: str, stdout: int = asyncio.subprocess.PIPE, **variables: str) -> Host:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *BRIDGE, *args),
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout,
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
                env={**environment(), **variables},
                limit=2**25,
            )
            undo.push_async_callback(process.communicate)
            undo.callback(end, process)
            return Host(process)

        yield start


def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A ladder behind a proxy that may break connections."""
    async with served() as (url, _), World.before(url) as made:
        yield made


# With the official SDK ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_clients_see_a_stdio_server_that_does_it_all(
    serve: Serve, mode: Literal["auto", "legacy"]
) -> None:
    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"metres": 3})

    async def note(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)
        begun.set()

    url = serve("--log", "memory:", "--", sys.executable, str(LADDER)).url
    steps: list[float] = []
    begun = asyncio.Event()
    started = StdioServerParameters(
        command=sys.executable, args=[*BRIDGE, url], env=environment(), cwd=str(ROOT)
    )
    async with Client(stdio_client(started), mode=mode, elicitation_callback=answer) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        assert tools == ["climb", "ladder", "runs", "grow", "ask"]

        done = await client.call_tool("climb", {"steps": 5, "delay": 0}, progress_callback=note)
        assert (done.content[0].text, steps) == ("climbed 5 steps", [1, 2, 3, 4, 5])  # type: ignore[union-attr]

        asked = await client.call_tool("ask", {})
        assert asked.content[0].text == "a ladder of 3 m"  # type: ignore[union-attr]

        begun.clear()
        calling = asyncio.create_task(
            client.call_tool("climb", {"steps": 100_000, "delay": 0.01}, progress_callback=note)
        )
        await soon(begun.wait())
        calling.cancel()
        await asyncio.wait({calling})
        again = await client.call_tool("climb", {"steps": 1, "delay": 0})
        assert again.content[0].text == "climbed 1 steps"  # type: ignore[union-attr]


WAITER = """
import asyncio, sys
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
server = MCPServer("waiter")

@server.tool()
async def wait() -> str:
    "Wait to be cancelled."
    print("waiting", file=sys.stderr, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", file=sys.stderr, flush=True)
    return "never"

server.run()
"""


async def test_a_cancellation_reaches_the_server_and_nothing_comes_of_the_call(
    serve: Serve, bridge: Bridged, tmp_path: Path
) -> None:
    (tmp_path / "waiter.py").write_text(WAITER)
    serving = serve("--log", "memory:", "--", sys.executable, str(tmp_path / "waiter.py"))
    host = await bridge(serving.url)
    await host.begin()
    await host.send(call(1, "wait"))
    await asyncio.to_thread(serving.says, "waiting")
    await host.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    await asyncio.to_thread(serving.says, "cancelled")
    await host.send(request(2, "ping"))
    await host.answer(2)
    host.leave()
    assert await host.ends() == 0
    assert [told["id"] for told in host.told if "id" in told] == [0, 2]


# The network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upgrade", ["auto", "never"])
async def test_the_host_does_not_notice_cuts(bridge: Bridged, world: World, upgrade: str) -> None:
    host = await bridge(world.url, "--upgrade", upgrade)
    await host.begin()
    await host.send(call(1, "climb", steps=30, delay=0.02))
    cuts = 0
    for step in (5, 12, 20):
        await host.until(lambda told, step=step: told.get("params", {}).get("progress") == step)
        cuts += world.cut()
    answer = await host.answer(1)
    assert cuts >= 3
    assert answer["result"]["content"][0]["text"] == "climbed 30 steps"
    assert host.steps(1) == list(range(1, 31))
    assert any(asked.endswith(" upgrade") for asked in world.asked) == (upgrade == "auto")
    host.leave()
    assert await host.ends() == 0
    assert host.err == ""


async def test_a_server_that_comes_later_is_waited_for(bridge: Bridged) -> None:
    with listening() as sock:  # bound, and nobody listens
        host = await bridge(f"http://127.0.0.1:{sock.getsockname()[1]}/mcp", "--watch", "--wait", "30")
        await host.send(INITIALIZE)
        await host.says("opening → resting")
        server = Uvicorn(gapless.asgi(ladder, log="memory:"), sock)
        await server.start()
        try:
            assert "result" in await host.answer(0)
            host.leave()
            assert await host.ends() == 0
        finally:
            await server.stop()


BYTES = "\u2028\u2029\x85 𝄞 é \\u00e9 \\u2028".encode()
NUMBERS = b"[1.0,1e2,123456789012345678901234567890,0.1000000000000000055,-0.0,1E400]"

ECHO = """
import sys
for line in sys.stdin.buffer:
    head, _, params = line.rstrip(b"\\n").partition(b',"params":')
    if b'"id":' in head:
        id = head.partition(b'"id":')[2].partition(b",")[0]
        sys.stdout.buffer.write(b'{"jsonrpc":"2.0","id":%b,"result":%b\\n' % (id, params))
        sys.stdout.buffer.flush()
"""


@pytest.mark.rule("W4")
async def test_what_is_carried_is_the_same_bytes_both_ways(bridge: Bridged, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    params = b'{"text":"%b","numbers":%b,  "spaced" : null}' % (BYTES, NUMBERS)
    async with served(backend=[sys.executable, str(tmp_path / "echo.py")]) as (url, _):
        host = await bridge(url)
        await host.send(b'{"jsonrpc":"2.0","id":"\\u0031","method":"x","params":%b}' % params)
        assert await host.line() == b'{"jsonrpc":"2.0","id":"\\u0031","result":%b}\n' % params
        host.leave()
        assert await host.ends() == 0


async def test_every_request_bears_the_headers_and_their_secrets_come_from_the_environment(
    bridge: Bridged, world: World
) -> None:
    given = ["--header", "Authorization: Bearer ${TOKEN}", "--header", "X-Price: 5 $$"]
    host = await bridge(world.url, *given, TOKEN="s3cret")
    await host.begin()
    await host.send(call(1, "climb", steps=30, delay=0.01))
    await host.answer(1)
    host.leave()
    assert await host.ends() == 0
    seen = [(headers.get("authorization"), headers.get("x-price")) for headers in world.headers]
    assert any(asked.endswith(" upgrade") for asked in world.asked)
    assert world.deleted
    assert set(seen) == {("Bearer s3cret", "5 $")}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("Authorization: Bearer ${NO_SUCH_TOKEN}", "takes ${NO_SUCH_TOKEN} from the environment"),
        ("X-Secret: cash$", "has a $ that begins no name"),
        ("X-Secret: s3cret\r\nHost: evil", "holds a character that no header may"),
        ("s3cret", "is not of the form 'name: value'"),
        ("X Secret: s3cret", "is not of the form 'name: value'"),
    ],
)
def test_a_header_that_cannot_be_is_misuse_and_no_secret_is_told(run: Run, header: str, told: str) -> None:
    done = run("bridge", "http://127.0.0.1:9/mcp", "--header", header)
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert told in done.err
    assert "s3cret" not in done.err


def test_a_url_that_is_none_is_misuse(run: Run) -> None:
    done = run("bridge", "gapless://here")
    assert (done.status, done.out) == (2, "")
    assert "is not an http or https URL" in done.err


# The end --------------------------------------------------------------------------------------------------


async def test_when_the_session_ends_what_is_open_is_answered_and_the_bridge_ends_with_1(
    bridge: Bridged, world: World
) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "climb", steps=100_000, delay=0.01), call("two", "climb", steps=100_000))
    await host.until(lambda told: told.get("params", {}).get("progress") == 3)
    await delete(world.straight, world.session)
    assert await host.ends() == 1
    reasons = {told["id"]: told["error"]["data"] for told in host.told if "error" in told}
    assert set(reasons) == {1, "two"}
    assert {data["reason"] for data in reasons.values()} == {"outcome-unknown"}
    assert host.err.count("\n") == 1
    assert "session-ended" in host.err
    assert "start the bridge again" in host.err
    assert not world.deleted


async def test_a_server_that_has_forgotten_the_session_ends_it(bridge: Bridged) -> None:
    with listening() as sock:
        port = sock.getsockname()[1]
        first = Uvicorn(gapless.asgi(ladder, log="memory:"), sock)
        await first.start()
        host = await bridge(f"http://127.0.0.1:{port}/mcp")
        await host.begin()
        await host.send(call(1, "climb", steps=100_000, delay=0.01))
        await host.until(lambda told: told.get("params", {}).get("progress") == 2)
        await first.stop()
    async with served_at(port):
        assert await host.ends() == 1
    (error,) = [told["error"] for told in host.told if "error" in told]
    assert error["data"] == {"reason": "outcome-unknown", "cause": "session-unknown"}
    assert host.err.count("\n") == 1


@asynccontextmanager
async def served_at(port: int) -> AsyncGenerator[None]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        server = Uvicorn(gapless.asgi(ladder, log="memory:"), sock)
        await server.start()
        try:
            yield
        finally:
            await server.stop()


async def test_at_the_end_of_stdin_what_was_asked_is_answered_and_the_session_deleted(
    bridge: Bridged, world: World
) -> None:
    host = await bridge(world.url)
    await host.send(INITIALIZE, INITIALIZED, call(1, "climb", steps=10, delay=0.02))
    host.leave(json.dumps(request(2, "ping")).encode())  # without an end of line
    assert await host.ends() == 0
    assert {told["id"] for told in host.told if "result" in told} == {0, 1, 2}
    assert host.steps(1) == list(range(1, 11))
    assert world.deleted
    assert host.err == ""


async def test_the_bridge_stays_until_the_server_has_said_that_the_session_is_deleted(
    bridge: Bridged, world: World
) -> None:
    def hold(link: Link) -> None:
        if link.request.startswith("DELETE"):
            link.hold(Direction.TO_CLIENT)
            held.set_result(link)

    held: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    host = await bridge(world.url)
    await host.begin()
    world.proxy.on_request = hold
    host.leave()
    link = await soon(held)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.process.wait(), 1.0)
    link.release(Direction.TO_CLIENT)
    assert await host.ends() == 0


@pytest.mark.rule("L7")
async def test_a_session_that_is_opened_while_a_signal_ends_the_bridge_is_deleted(
    bridge: Bridged, world: World
) -> None:
    def hold(link: Link) -> None:
        world.asked.append(link.request)
        if link.request == "POST /mcp/session":
            link.hold(Direction.TO_CLIENT)
            held.set_result(link)

    held: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    world.proxy.on_request = hold
    host = await bridge(world.url, "--watch")
    link = await soon(held)
    host.process.send_signal(signal.SIGTERM)
    await host.says("→ over")
    link.release(Direction.TO_CLIENT)
    assert await host.ends(LEAVES_WITHIN) == 0
    assert world.deleted


async def test_a_host_that_leaves_without_a_word_leaves_no_session_behind(
    bridge: Bridged, world: World
) -> None:
    host = await bridge(world.url)
    host.leave()
    assert await host.ends(LEAVES_WITHIN) == 0
    assert (world.deleted, host.told, host.err) == (True, [], "")


async def test_an_endless_call_does_not_keep_a_host_that_left(bridge: Bridged, world: World) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "climb", steps=100_000, delay=0.05))
    await host.until(lambda told: told.get("params", {}).get("progress") == 1)
    host.leave()
    assert await host.ends() == 0
    assert host.told[-1]["id"] == 1
    assert host.told[-1]["error"]["data"] == {"reason": "outcome-unknown", "cause": "closed"}
    assert world.deleted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_session_and_the_bridge_in_time(
    bridge: Bridged, world: World, number: signal.Signals
) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "climb", steps=100_000, delay=0.05))
    await host.until(lambda told: told.get("params", {}).get("progress") == 1)
    host.process.send_signal(number)
    assert await host.ends(LEAVES_WITHIN) == 0
    assert host.told[-1]["error"]["data"] == {"reason": "outcome-unknown", "cause": "closed"}
    assert (world.deleted, host.err) == (True, "")


async def test_a_server_that_has_vanished_does_not_hold_up_the_end_and_a_second_signal_is_immediate(
    bridge: Bridged, world: World
) -> None:
    async def vanished(*args: str) -> Host:
        host = await bridge(world.url, "--upgrade", "never", *args)
        await host.begin()
        world.proxy.on_link = lambda link, opened: link.black_hole() if opened else None
        for link in world.proxy.links:
            link.black_hole()
        host.process.send_signal(signal.SIGTERM)
        return host

    host = await vanished()
    assert await host.ends(LEAVES_WITHIN) == 0

    world.proxy.on_link = None
    host = await vanished("--watch")
    await host.says("→ over")
    host.process.send_signal(signal.SIGTERM)
    assert await host.ends(LEAVES_WITHIN) == 128 + signal.SIGTERM


LOOKS_UP_FOR_EVER = """
import socket, sys, threading

def look_up(*args, **more):
    print("looking up", file=sys.stderr, flush=True)
    threading.Event().wait()

socket.getaddrinfo = look_up
sys.modules["uvloop"] = None  # which has C look names up
"""


async def test_a_name_that_is_looked_up_for_ever_does_not_hold_up_the_end(
    bridge: Bridged, tmp_path: Path
) -> None:
    path = customized(tmp_path, LOOKS_UP_FOR_EVER)
    host = await bridge("http://nowhere.invalid/mcp", PYTHONPATH=path)
    await host.send(INITIALIZE)
    await host.says("looking up")
    host.process.send_signal(signal.SIGTERM)
    assert await host.ends(LEAVES_WITHIN) == 0
    # The look-up begins with the bridge: what was sent may not have been read by then.
    assert all(told["error"]["data"] == {"reason": "not-sent", "cause": "closed"} for told in host.told)


async def test_a_host_that_closes_stdout_has_left(bridge: Bridged, world: World) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "climb", steps=100_000, delay=0.02))
    await host.until(lambda told: told.get("params", {}).get("progress") == 1)
    host.deafen()
    assert await host.ends() == 0
    assert (world.deleted, host.err) == (True, "")


# At the start ---------------------------------------------------------------------------------------------


async def test_a_server_that_cannot_be_reached_is_given_up_and_every_request_answered(
    bridge: Bridged,
) -> None:
    with listening() as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/mcp"
        host = await bridge(url, "--wait", "1")
        await host.send(INITIALIZE, INITIALIZED, request(1, "ping"))
        assert await host.ends() == 1
    assert [told["id"] for told in host.told] == [0, 1]
    assert [told["error"]["data"] for told in host.told] == [{"reason": "not-sent", "cause": "gave-up"}] * 2
    assert host.err.count("\n") == 1
    assert f"no session at {url} in 1 seconds" in host.err
    assert "is the server running" in host.err


async def test_a_script_whose_server_is_not_there_is_told_and_fails(bridge: Bridged) -> None:
    with listening() as nobody:
        host = await bridge(f"http://127.0.0.1:{nobody.getsockname()[1]}/mcp", "--wait", "6")
        await host.send(INITIALIZE)
        host.leave()
        assert await host.ends() == 1
    (told,) = host.told
    assert told["error"]["data"] == {"reason": "not-sent", "cause": "gave-up"}


async def test_for_a_server_of_standard_http_it_says_what_to_do(bridge: Bridged) -> None:
    with listening() as sock:
        server = Uvicorn(MCPServer("plain").streamable_http_app(), sock)
        await server.start()
        try:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
            host = await bridge(url)
            await host.send(INITIALIZE)
            assert await host.ends() == 1
        finally:
            await server.stop()
    assert host.told[0]["error"]["data"] == {"reason": "not-sent", "cause": "not-gapless"}
    assert host.err.count("\n") == 1
    assert f"{url}: the server answered 404 to POST /session" in host.err
    assert "gapless serve --upstream URL" in host.err


async def test_where_credentials_are_missing_it_says_how_to_give_them(bridge: Bridged, world: World) -> None:
    world.proxy.on_request = lambda link: link.answer(401, "application/json", b"{}")
    host = await bridge(world.url)
    await host.send(INITIALIZE)
    assert await host.ends() == 1
    assert host.told[0]["error"]["data"] == {"reason": "not-sent", "cause": "unauthenticated"}
    assert host.err.count("\n") == 1
    assert "answered 401" in host.err
    assert "--header" in host.err


# What hosts do wrong --------------------------------------------------------------------------------------


@pytest.mark.rule("W5")
async def test_lines_that_cannot_be_carried_are_answered_and_the_bridge_goes_on(
    bridge: Bridged, world: World
) -> None:
    async def refused(line: bytes) -> dict[str, Any]:
        await host.send(line)
        answer = await host.until(lambda told: "error" in told)
        assert (answer["error"]["code"], answer["error"]["data"]) == (-32600, {"reason": "malformed"})
        return answer["id"]

    host = await bridge(world.url)
    await host.begin()
    assert await refused(b"good morning") is None
    assert await refused(b"[%b]" % json.dumps(request(1, "ping")).encode()) is None
    assert await refused(b'{"jsonrpc":"2.0","id":null,"method":"ping"}') is None
    assert await refused(b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}') == "\ufffd"
    assert await refused(b'{"jsonrpc":"2.0","id":2,"method":"ping","params":{"x":NaN}}') == 2
    assert await refused(b'{"jsonrpc":"2.0","id":3,"method":"ping","params":"\xff"}') == 3
    assert await refused(b'{"jsonrpc":"2.0","id":4,"method":"ping","params":%b}' % (b"[" * 100_000)) == 4
    assert await refused(b'{"jsonrpc":"2.0","method":"ping","id":5,"params":{"x":NaN}}') == 5
    await host.send(b"", b"  ", b'{"jsonrpc":"2.0","id":6,"method":"ping"}\r')
    assert "result" in await host.answer(6)
    host.leave()
    assert await host.ends() == 0
    assert [told["id"] for told in host.told] == [0, None, None, None, "\ufffd", 2, 3, 4, 5, 6]


@pytest.mark.rule("W5")
async def test_a_line_above_the_servers_limit_is_refused_under_its_id(
    bridge: Bridged,
) -> None:
    def ping(id: int, size: int) -> bytes:
        line = json.dumps(request(id, "ping", _meta={"x": ""})).encode()
        return line.replace(b'""', b'"%b"' % (b"x" * (size - len(line))))

    limit = 5_000_000  # not the default
    async with served(max_message_bytes=limit) as (url, _):
        host = await bridge(url)
        await host.begin()
        for id, size in ((1, limit), (2, limit + 1), (3, 40_000_000)):
            await host.send(ping(id, size))
            await host.answer(id)
        host.leave()
        assert await host.ends() == 0
    answers = {told["id"]: told for told in host.told}
    assert "result" in answers[1]
    assert [answers[id]["error"]["data"] for id in (2, 3)] == [{"reason": "too-large"}] * 2


@pytest.mark.rule("W5")
async def test_an_unusable_answer_of_the_host_does_not_leave_the_server_waiting(
    bridge: Bridged, world: World
) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "ladder", run="asks", rungs=1, kinds=["ask"]))
    asked = await host.until(lambda told: told.get("method") == "elicitation/create")
    await host.send(b'{"jsonrpc":"2.0","id":%b,"result":{"x":NaN}}' % json.dumps(asked["id"]).encode())
    answer = await host.answer(1)
    assert "unusable answer of the client" in json.dumps(answer)


async def test_the_id_of_a_request_in_flight_is_refused(bridge: Bridged, world: World) -> None:
    host = await bridge(world.url)
    await host.begin()
    await host.send(call(1, "climb", steps=5, delay=0.05), request(1, "ping"), request("1", "ping"))
    refused = await host.until(lambda told: "error" in told)
    assert (refused["id"], refused["error"]["data"]) == (1, {"reason": "duplicate-id"})
    await host.answer(1)
    host.leave()
    assert await host.ends() == 0
    results = {told["id"]: told["result"] for told in host.told if "result" in told}
    assert results["1"] == {}
    assert results[1]["content"][0]["text"] == "climbed 5 steps"


def talker(count: int, size: int) -> tuple[MCPServer, asyncio.Event]:
    """A server with a tool that says much, and an event for when it has said it."""
    server, done = MCPServer("talker"), asyncio.Event()

    @server.tool()
    async def talk(ctx: Context) -> str:
        for number in range(count):
            await ctx.report_progress(number, None, "." * size)
        done.set()
        return "talked"

    return server, done


@pytest.mark.parametrize("upgrade", ["auto", "never"])
async def test_a_host_that_does_not_read_is_waited_for_and_misses_nothing(
    bridge: Bridged, upgrade: str
) -> None:
    count, size = 400, 100_000
    server, done = talker(count, size)
    moved = asyncio.Event()
    async with served(backend=server) as (url, _), World.before(url) as world:
        world.proxy.on_bytes = lambda *_: moved.set()
        async with unread(bridge, world.url, "--upgrade", upgrade) as (host, pile):
            before = memory(host)
            await soon(done.wait())
            with suppress(TimeoutError):
                while True:  # until nothing more passes
                    moved.clear()
                    await asyncio.wait_for(moved.wait(), 1.0)
            assert memory(host) - before < count * size / 2

            reports = [await pile.line() for _ in range(count)]
            assert [report["params"]["progress"] for report in reports] == list(range(count))
            assert (await pile.line())["result"]["content"][0]["text"] == "talked"
            host.leave()
            assert await host.ends() == 0


async def test_a_host_that_does_not_read_does_not_hold_up_a_signal(bridge: Bridged) -> None:
    server, done = talker(100, 10_000)
    async with served(backend=server) as (url, _), unread(bridge, url) as (host, _):
        await soon(done.wait())
        host.process.send_signal(signal.SIGTERM)
        assert await host.ends(LEAVES_WITHIN) == 0


@pytest.mark.rule("L7")
async def test_what_arrived_before_the_end_comes_after_it_and_what_a_host_asks_then_is_answered(
    bridge: Bridged,
) -> None:
    server, done = talker(20, 10_000)  # more than a pipe takes, less than is read ahead
    asked = asyncio.Event()

    @server.tool()
    async def hold() -> str:
        asked.set()
        return await asyncio.Future[str]()

    async with served(backend=server) as (url, _), World.before(url) as world:
        async with unread(bridge, world.url, "--watch") as (host, pile):
            await soon(done.wait())
            await host.send(call(2, "hold"))
            await soon(asked.wait())
            await delete(world.straight, world.session)
            await host.says("→ over")
            await host.send(request(3, "ping"))
            rest = await pile.rest()
            assert await host.ends() == 1
    assert [told["result"]["content"][0]["text"] for told in rest if "result" in told] == ["talked"]
    errors = {told["id"]: told["error"]["data"] for told in rest if "error" in told}
    assert errors[2] == {"reason": "outcome-unknown"}, "as the server has it"
    assert errors[3] == {"reason": "not-sent", "cause": "session-ended"}


async def test_requests_behind_more_than_can_wait_are_answered_when_the_server_is_given_up(
    bridge: Bridged,
) -> None:
    with listening() as nobody:
        host = await bridge(f"http://127.0.0.1:{nobody.getsockname()[1]}/mcp", "--wait", "1")
        waiting = [{"jsonrpc": "2.0", "method": "notifications/x"}] * 1030
        await host.send(*waiting, *(request(id, "ping") for id in range(100)))
        assert await host.ends() == 1
    assert [told["id"] for told in host.told] == list(range(100))


NOISY = """
import secrets
drawn = secrets.token_urlsafe

def draw(*args):
    print("noise", flush=True)
    return drawn(*args)

secrets.token_urlsafe = draw
"""


async def test_what_others_print_does_not_come_between_messages(
    bridge: Bridged, world: World, tmp_path: Path
) -> None:
    host = await bridge(world.url, PYTHONPATH=customized(tmp_path, NOISY))
    await host.begin()
    host.leave()
    assert await host.ends() == 0
    assert "noise" in host.err
    assert len(host.told) == 1
