"""What one event costs, counted instead of timed: from the MCP server's pipe, or an object in the process,
to an event stream, and on to a client's application; what a call costs, commits and all, and a crossing to
a WebSocket.

Counted are calls, of Python's functions and of C's, by the place that makes them. What is called once for a
read, a commit or a write is left out, as how many events those hold is a matter of luck; what is called for
every event is not, so an event that has a commit, a task or a write of its own shows. No noise changes that.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final, Literal

import pytest

from benchmarks.harness import CHILD, WrongEvents
from benchmarks.load import DONE, INITIALIZE, call, check, last_id
from benchmarks.servers.emitter import server
from gapless.backends.base import BackendFactory
from gapless.backends.sdk import SdkBackends
from gapless.backends.stdio import StdioBackends
from gapless.log.memory import MemoryLog
from gapless.log.sqlite import SqliteLog
from gapless.protocol import outbox
from gapless.protocol.block import BlockDecoder, encode_block
from gapless.server.app import Gapless, Settings, build
from tests.client.offline import offline

EVENTS: Final = 1000

REPEATS: Final = 50
RECORDED: Final = {"session": 17, "stream": 17, "object": 40, "client": 42, "call": 1400, "crossing": 1320}
"""Calls for each event by view, of an object in process and in a client; for each `tools/call`, and each
crossing: when last looked at. Lower them when a path gets shorter."""
MOST: Final = 1.5
"""How many times that is too much, either way: a path that got as much shorter is recorded anew."""

HEADERS: Final = {
    "host": "localhost",
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
    "mcp-client": "guard",
}

View = Literal["session", "stream"]
Way = Literal["session", "stream", "object", "client", "call", "crossing"]
WAYS: Final = tuple(RECORDED)
Told = Callable[[bytes], object]


class Calls:
    """Counts calls by who makes them, where, and of what."""

    def __init__(self) -> None:
        self._made: Counter[tuple[object, int, object]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            caller = frame.f_back
            self._made[caller and caller.f_code, caller.f_lasti if caller else 0, frame.f_code] += 1
        elif event == "c_call":
            self._made[frame.f_code, frame.f_lasti, arg.__name__] += 1

    def for_each(self, events: int) -> float:
        """Calls for each of so many events, of what is called for at least every other one."""
        return sum(count for count in self._made.values() if count >= events / 2) / events


class Asker:
    """Asks the application without a socket."""

    def __init__(self, app: Gapless) -> None:
        self._app = app
        self.session = ""
        """The stream view's session, once it has one."""

    async def ask(
        self, method: str, path: str, message: Any = None, *, number: int = 0, told: Told = len
    ) -> None:
        """One request; `told` gets the bytes of its answer as they come."""
        headers = {**HEADERS, "mcp-message-number": str(number)}
        if self.session:
            headers["mcp-session-id"] = self.session
        body = b"" if message is None else json.dumps(message).encode()
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {"type": "http", "method": method, **_scope("http", path, headers)}

        async def receive() -> dict[str, Any]:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        async def send(answer: Any) -> None:
            for name, value in answer.get("headers", ()):
                if name == b"mcp-session-id":
                    self.session = value.decode()
            told(answer.get("body", b""))

        await self._app(scope, receive, send)

    async def cross(self, path: str, cursor: str) -> str:
        """A handshake, the gap, its acknowledgement, and away; the cursor after the gap."""
        headers = {"host": "localhost", "last-event-id": cursor, "mcp-client": "guard"}
        scope = {"type": "websocket", "subprotocols": ["mcp.v1"], **_scope("ws", path, headers)}
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said.put_nowait({"type": "websocket.connect"})
        heard, echo = b"", b"?"

        async def send(answer: Any) -> None:
            nonlocal heard, echo
            if answer["type"] == "websocket.accept":
                echo = b"id: " + dict(answer["headers"])[b"x-mcp-resume-cursor"] + b"."
            heard += answer.get("text", "").encode()
            if echo in heard and said.empty():
                ack = f'event: cursor-ack\ndata: {{"cursor":"{last_id(heard)}"}}\n\n'
                said.put_nowait({"type": "websocket.receive", "text": ack})
                said.put_nowait({"type": "websocket.disconnect", "code": 1000})

        await self._app(scope, said.get, send)
        return last_id(heard)


def _scope(scheme: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    return {
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": scheme,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


def piped() -> StdioBackends:
    """The benchmarks' stdio server."""
    return StdioBackends([sys.executable, "-I", str(CHILD)])


async def delivered(view: View, backends: BackendFactory | None = None) -> float:
    """Calls for each of 1,000 events: read from a pipe, linked, committed, written to an event stream."""
    app = build(MemoryLog(), backends or piped(), Settings())
    asker, calls, done = Asker(app), Calls(), asyncio.Event()
    arrived: list[bytes] = []

    def told(data: bytes) -> None:
        arrived.append(data)
        if DONE in data:
            done.set()

    async def burst(id: int) -> None:
        arrived.clear()
        done.clear()
        await post(id, call(id, "burst", {"count": EVENTS}), told)
        await done.wait()

    await app.start()
    try:
        post, reading = await opened(asker, view, told)
        await burst(1)  # what is cached from then on
        sys.setprofile(calls)
        try:
            await burst(2)
        finally:
            sys.setprofile(None)
        check(b"".join(arrived), EVENTS)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    finally:
        await app.close()
    return calls.for_each(EVENTS)


async def opened(asker: Asker, view: View, told: Told) -> tuple[Any, list[asyncio.Task[None]]]:
    """A session with its handshake done: how to post in it, and who reads its stream, if anybody."""
    initialize = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}
    if view == "stream":
        await asker.ask("POST", "/mcp", initialize)

        async def post(number: int, message: Any, told: Told) -> None:
            await asker.ask("POST", "/mcp", message, told=told)

        return post, []
    body: list[bytes] = []
    await asker.ask("POST", "/mcp/session", told=body.append)
    path = f"/mcp/session/{json.loads(b''.join(body))['session']}"
    asker.session = ""

    async def numbered(number: int, message: Any, told: Told) -> None:
        await asker.ask("POST", f"{path}/messages", message, number=number + 1)

    await numbered(0, initialize, len)
    return numbered, [asyncio.create_task(asker.ask("GET", f"{path}/events", told=told))]


async def taken() -> float:
    """Calls for each of 1,000 events: decoded, checked, handed to the application, accepted."""
    driver, log = offline(ahead=EVENTS)
    blocks = [log.emit(b'{"jsonrpc":"2.0","method":"notifications/n"}') for _ in range(EVENTS)]
    wire = b"".join(encode_block(block.event, block.data or b"", block.id) for block in blocks)
    calls = Calls()
    sys.setprofile(calls)
    try:
        await driver._read(2, BlockDecoder(len(wire)).feed(wire))
        for block in blocks:
            assert await driver.next() == block.data
            driver.accepted()
    finally:
        sys.setprofile(None)
    assert driver.machine.cursor == log.id(EVENTS)
    return calls.for_each(EVENTS)


async def repeated(once: Callable[[Asker], Awaitable[Callable[[int], Awaitable[None]]]]) -> float:
    """Calls for each repetition of something, in the loop's own thread and with the log's work done there."""
    with TemporaryDirectory() as folder:
        log = SqliteLog(Path(folder) / "log.db", synchronous="off", inline=True)
        app, calls = build(log, piped(), Settings()), Calls()
        await app.start()
        try:
            again = await once(Asker(app))
            for n in range(1, 11):
                await again(n)
            sys.setprofile(calls)
            try:
                for n in range(11, 11 + REPEATS):
                    await again(n)
            finally:
                sys.setprofile(None)
        finally:
            await app.close()
    return calls.for_each(REPEATS)


async def called(asker: Asker) -> Callable[[int], Awaitable[None]]:
    """One `tools/call` after another: two commits each."""
    post, _reading = await opened(asker, "stream", len)

    async def again(n: int) -> None:
        answer: list[bytes] = []
        await post(n, call(n, "echo", {"text": "x"}), answer.append)
        assert DONE in b"".join(answer)

    return again


async def crossed(asker: Asker) -> Callable[[int], Awaitable[None]]:
    """One socket after another, each with what the last one left."""
    body: list[bytes] = []
    await asker.ask("POST", "/mcp/session", told=body.append)
    session = json.loads(b"".join(body))
    path, cursor = f"/mcp/session/{session['session']}/events", session["cursor"]

    async def again(_: int) -> None:
        nonlocal cursor
        before, cursor = cursor, await asker.cross(path, cursor)
        assert int(cursor.partition(".")[0]) == int(before.partition(".")[0]) + 1, "its own `U`"

    return again


async def counted(way: Way) -> float:
    """Calls for each event on one of the ways, for each call, or each crossing."""
    match way:
        case "client":
            return await taken()
        case "object":
            return await delivered("stream", SdkBackends(server))
        case "call":
            return await repeated(called)
        case "crossing":
            return await repeated(crossed)
        case _:
            return await delivered(way)


@pytest.mark.parametrize("way", WAYS)
async def test_an_event_costs_no_more_calls_than_it_did(way: Way) -> None:
    assert await counted(way) <= MOST * RECORDED[way]


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_recorded_is_not_far_above_what_is_so(way: Way) -> None:
    found = await counted(way)
    assert RECORDED[way] <= MOST * found, f"it is {found:.0f} now: record that"


async def test_one_more_json_parse_for_each_event_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    without = await delivered("session")
    encode = outbox.encode_events

    def parses(*args: Any) -> list[bytes]:
        blocks = encode(*args)
        for block in blocks:
            json.loads(block.partition(b"data: ")[2])
        return blocks

    monkeypatch.setattr(outbox, "encode_events", parses)
    assert await delivered("session") > MOST * without


async def test_a_call_that_does_all_its_work_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    without = await counted("call")
    ask = Asker.ask

    async def twice(asker: Asker, *args: Any, **kwargs: Any) -> None:
        await ask(asker, *args, **kwargs)
        await ask(asker, *args, **kwargs)

    monkeypatch.setattr(Asker, "ask", twice)
    assert await counted("call") > MOST * without


@pytest.mark.parametrize("arrived", [b'"n":0', b'"n":0 "n":0', b'"n":1 "n":0', b'"n":0 "n":1 "n":1'])
def test_a_benchmark_whose_events_are_lost_repeated_or_out_of_order_fails(arrived: bytes) -> None:
    check(b'"n":0 "n":1', 2)
    with pytest.raises(WrongEvents):
        check(arrived, 2)
