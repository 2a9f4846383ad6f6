"""N1: what reaches a process that does not own the session is served by the one that does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server import relay
from gapless.server.app import Gapless
from gapless.server.relay import RELAYED, Doorway, Reach, bury, pass_on, reachable
from gapless.server.wire import read_body, respond
from tests.server.harness import (
    JSON,
    Answer,
    Fragile,
    Serve,
    Server,
    Socket,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)

LIMIT: Final = 2 * 1024 * 1024
TURNS: Final = 2000
"""Turns of the loop in which what is not held back would go far."""


class Passing:
    """A process that owns nothing. What it may serve itself after all is served by `instead`."""

    def __init__(self, app: ASGIApp, owner: ASGIApp | None = None, instead: ASGIApp | None = None) -> None:
        self.app = app
        self.doorway = Doorway(owner or app, LIMIT)
        self.address = ""
        self.given_up = asyncio.get_running_loop().create_future()
        self.limit = LIMIT
        self._instead = instead or _unwanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.address = await self.doorway.open(None)
            await self.app(scope, receive, send)
            await self.doorway.close()
            return
        again = await pass_on(self.address, scope, receive, send, given_up=self.given_up, limit=self.limit)
        if again is not None:
            await self._instead(scope, again, send)


async def _unwanted(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(f"{scope} is not to be served here")


async def apart(
    serve: Serve, owner: ASGIApp | None = None, instead: ASGIApp | None = None, **more: Any
) -> tuple[Server, Passing]:
    """A server that passes everything on, to the real application, or to `owner`."""
    made: list[Passing] = []

    def wrap(app: Gapless) -> Passing:
        made.append(Passing(app, owner, instead))
        return made[0]

    return await serve(wrap=wrap, **more), made[0]


class Client:
    """What a server is to an application: `messages` are received, what is sent is kept."""

    def __init__(self, *messages: Message) -> None:
        self._coming: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self.say(*messages)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._coming.put_nowait(message)

    async def receive(self) -> Message:
        return await self._coming.get()

    async def send(self, message: Message) -> None:
        self._sent.put_nowait(message)

    async def told(self) -> Message:
        """The next message that was sent to it."""
        return await soon(self._sent.get())

    @property
    def untold(self) -> bool:
        return self._sent.empty()


class Owner:
    """An application that leaves its exchange to the test."""

    def __init__(self) -> None:
        self._exchanges: asyncio.Queue[tuple[Scope, Receive, Send]] = asyncio.Queue()
        self._over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._exchanges.put_nowait((scope, receive, send))
        await self._over.wait()

    async def asked(self) -> tuple[Scope, Receive, Send]:
        """The next exchange."""
        return await soon(self._exchanges.get())

    @property
    def unasked(self) -> bool:
        return self._exchanges.empty()

    def leave(self) -> None:
        """Return from all of them."""
        self._over.set()


def frame(message: Message) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


def scope_of(kind: str, **more: Any) -> Scope:
    scope: Scope = {"type": kind, "path": "/", "query_string": b"", "headers": [], "extensions": {}}
    return scope | ({"method": "POST"} if kind == "http" else {"subprotocols": []}) | more


def body(data: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


START: Final[Message] = {"type": "http.response.start", "status": 200, "headers": []}
END: Final[Message] = {"type": "http.response.body", "body": b""}
GONE: Final[Message] = {"type": "http.disconnect"}
CONNECT: Final[Message] = {"type": "websocket.connect"}
ACCEPT: Final[Message] = {"type": "websocket.accept", "subprotocol": None, "headers": []}


def chunk(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


@pytest.fixture
async def owner() -> Owner:
    return Owner()


@pytest.fixture
async def doorway(owner: Owner) -> AsyncIterator[Doorway]:
    """The doorway of `owner`."""
    doorway = Doorway(owner, LIMIT)
    yield doorway
    await turns(10)  # asyncio forgets, unclosed, what it was about to accept
    await soon(doorway.close())
    await turns(10)


@pytest.fixture
async def address(doorway: Doorway) -> str:
    return await doorway.open(None)


@pytest.fixture
async def given_up() -> AsyncIterator[asyncio.Future[None]]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    yield future
    future.cancel()


Pass = Callable[..., asyncio.Task[Receive | None]]


@pytest.fixture
async def passing(address: str, given_up: asyncio.Future[None]) -> AsyncIterator[Pass]:
    """Passes an exchange of a client on to `owner`."""
    tasks: list[asyncio.Task[Receive | None]] = []

    def begin(client: Client, scope: Scope, to: str = address) -> asyncio.Task[Receive | None]:
        exchange = pass_on(to, scope, client.receive, client.send, given_up=given_up, limit=LIMIT)
        tasks.append(asyncio.create_task(exchange))
        return tasks[-1]

    yield begin
    for task in tasks:
        task.cancel()
    await soon(asyncio.gather(*tasks, return_exceptions=True))


@pytest.fixture
def near() -> Iterator[str]:
    """The path of a log, short enough for a socket beside it."""
    with tempfile.TemporaryDirectory(prefix="g") as directory:
        yield f"{directory}/log.db"


@pytest.fixture
async def by_hand(address: str) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection to `owner` for a passing process that is written by hand."""
    _, writer = await soon(asyncio.open_unix_connection(address))
    yield writer
    writer.transport.abort()


async def turns(count: int = TURNS) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(so: Callable[[], bool]) -> None:
    """Return once it is so."""
    while not so():
        await turns(1)


# A whole session -----------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_session_is_served_through_another_process(serve: Serve) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    await session.backend.say(note("one"), note("two", text="ü \u2028 \U0001f600"))
    stream = await session.events(session.start)
    events = await stream.events(2)
    assert [seq_of(event.id) for event in events] == [1, 2]
    resumed = await session.events(events[0].id)
    assert (await resumed.event()).data == events[1].data
    await session.backend.say(note("three"))
    assert (await resumed.message())["method"] == (await stream.message())["method"] == "three"
    assert (await session.post(2, request(7))).json() == {"received": 2}
    assert (await session.backend.take())["id"] == 7
    assert (await session.ack(events[1].id)).json() == {"ack": 2}
    assert (await session.get("9.0.0000000000000000")).reason == (409, "cursor-ahead")
    assert (await session.delete()).status == 204
    await stream.end()
    assert (await session.get(session.start)).reason == (404, "session-ended")


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_session_of_the_stream_view_is_served_through_another_process(serve: Serve) -> None:
    server, _ = await apart(serve)
    streams = await server.initialized()
    stream = await streams.call(1)
    await streams.backend.take()
    await streams.backend.say(result(1, done=True), related=1)
    assert (await stream.message())["result"] == {"done": True}
    assert await stream.end() == []


@on_both_servers
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("N1")
async def test_the_door_is_passed_through_another_process(serve: Serve, steps: int) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    await session.backend.say(note("one"))
    ticket = (await session.pend(session.start))["ticket"] if steps == 2 else None
    socket = await session.bind(session.start, ticket)
    assert socket.headers["X-MCP-Resume-Cursor"] == "2"
    assert socket.headers["Sec-WebSocket-Protocol"] == "mcp.v1"
    assert [seq_of(event.id) for event in await socket.cross()] == [1, 2]
    await session.backend.say(note("live"))
    live = await socket.event()
    await socket.ack(str(live.id))
    await socket.say(2, request(7))
    assert await socket.control("received") == {"received": 2, "process": "p"}, "the ack came before it"
    assert (await session.ack(session.start)).json() == {"ack": 3}
    assert (await session.backend.take())["id"] == 7
    assert (await session.delete()).status == 204
    await socket.event()
    assert await socket.closed() == 4404


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_denial_arrives_as_it_was_sent(serve: Serve) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    assert (await session.denied("9.0.0000000000000000")).reason == (409, "cursor-ahead")
    found = await server.knock(f"{session.base}/events", {"Last-Event-ID": session.start}, subprotocols=())
    assert isinstance(found, Answer)
    assert found.reason == (426, "upgrade-unavailable")
    assert found.header("sec-websocket-protocol") == "mcp.v1"


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_message_of_a_mebibyte_passes_each_way(serve: Serve) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    large = request(7, text="x" * 2**20)
    assert (await session.post(2, large)).status == 202
    assert await session.backend.take() == large
    await session.backend.say(large)
    stream = await session.events(session.start)
    assert await stream.message() == large
    socket = await session.bind(session.start)
    assert len(await socket.cross()) == 2
    await socket.say(3, large | {"id": 8})
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert await session.backend.take() == large | {"id": 8}
    await session.backend.say(large | {"id": 9})
    assert await socket.message() == large | {"id": 9}


@pytest.mark.rule("N1")
async def test_a_reader_that_stops_holds_its_position_at_the_owner(serve: Serve) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    stream = await session.events(session.start)
    stream.stall()
    await session.backend.say(*(note(str(n), x="x" * 500_000) for n in range(40)))
    (live,) = server.app.sessions.all()
    (delivery,) = live.machine.connections.values()
    assert delivery.position < 20
    stream.resume()
    assert [seq_of(event.id) for event in await stream.events(40)] == list(range(1, 41))


# What the owner's application sees -----------------------------------------------------------------


@pytest.mark.rule("N1")
async def test_a_scope_arrives_less_what_is_not_plain_data(owner: Owner, passing: Pass) -> None:
    plain: Scope = {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "wss",
        "path": "/mcp/ü",
        "raw_path": b"/mcp/%C3%BC",
        "root_path": "/mcp",
        "query_string": b"cursor=1",
        "headers": [[b"host", b"\xff"], [b"x", b"1"], [b"x", b"2"]],
        "subprotocols": ["mcp.v1"],
        "client": ["127.0.0.1", 1],
        "server": ["/socket", None],
    }
    denials = {"websocket.http.response": {}}
    passing(Client(CONNECT), plain | {"extensions": denials, "state": {}, "app": owner})
    scope, receive, _ = await owner.asked()
    assert scope == plain | {"extensions": denials, RELAYED: True}
    assert await soon(receive()) == CONNECT


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_client_that_goes_is_gone_for_the_owner(serve: Serve) -> None:
    server, _ = await apart(serve)
    session = await server.started()
    (live,) = server.app.sessions.all()
    for connect in (session.events, session.bind):
        client = await connect(session.start)
        assert len(live.machine.connections) == 1
        client.drop()
        await soon(until(lambda: not live.machine.connections))


@pytest.mark.rule("N1")
async def test_a_close_code_reaches_the_owner(owner: Owner, passing: Pass) -> None:
    client = Client(CONNECT)
    exchange = passing(client, scope_of("websocket"))
    _, receive, send = await owner.asked()
    await receive()
    await send(ACCEPT)
    bye = {"type": "websocket.disconnect", "code": 4321, "reason": "so"}
    client.say({"type": "websocket.receive", "text": "x", "bytes": None}, bye)
    assert await soon(receive()) == {"type": "websocket.receive", "text": "x", "bytes": None}
    assert await soon(receive()) == bye
    owner.leave()
    assert await soon(exchange) is None
    assert await client.told() == ACCEPT
    assert client.untold


@pytest.mark.rule("N1")
async def test_a_socket_that_the_owner_closes_is_closed_once(owner: Owner, passing: Pass) -> None:
    client = Client(CONNECT)
    exchange = passing(client, scope_of("websocket"))
    _, _, send = await owner.asked()
    bye = {"type": "websocket.close", "code": 4404}
    await send(ACCEPT)
    await send(bye)
    owner.leave()
    assert await soon(exchange) is None
    assert [await client.told(), await client.told()] == [ACCEPT, bye]
    assert client.untold


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.rule("N1")
async def test_a_passing_process_that_dies_is_a_client_that_is_gone(
    owner: Owner, by_hand: asyncio.StreamWriter, kind: str
) -> None:
    by_hand.write(frame(scope_of(kind)) + frame(body(b"x")))
    _, receive, send = await owner.asked()
    assert await soon(receive()) == body(b"x")
    by_hand.transport.abort()
    expected = {"http": GONE, "websocket": {"type": "websocket.disconnect", "code": 1006}}[kind]
    assert await soon(receive()) == expected
    again = asyncio.ensure_future(receive())
    await turns(10)
    assert not again.done(), "it is not said for ever: who waits for more, with a timeout, would not let go"
    again.cancel()
    with pytest.raises(OSError, match=r"^$"):
        await send(START)


@pytest.mark.rule("N1")
async def test_a_client_who_cannot_be_sent_to_is_gone_for_the_owner(owner: Owner, passing: Pass) -> None:
    class Deaf(Client):
        async def send(self, message: Message) -> None:
            await super().send(message)
            raise RuntimeError("it has gone")

    client = Deaf(CONNECT)
    exchange = passing(client, scope_of("websocket"))
    _, receive, send = await owner.asked()
    await receive()
    await send(ACCEPT)
    assert await soon(exchange) is None
    assert await client.told() == ACCEPT
    assert client.untold
    assert (await soon(receive()))["type"] == "websocket.disconnect"


@pytest.mark.rule("N1")
async def test_a_client_that_goes_is_gone_once(owner: Owner, passing: Pass) -> None:
    """Whatever its server says: uvicorn says so as often as it is asked."""
    passing(Client(GONE, GONE), scope_of("http"))
    _, receive, _ = await owner.asked()
    assert await soon(receive()) == GONE
    again = asyncio.ensure_future(receive())
    await turns(50)
    assert not again.done()
    again.cancel()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20, -1])
@pytest.mark.rule("N1")
async def test_a_receive_that_is_cancelled_loses_nothing(
    owner: Owner, by_hand: asyncio.StreamWriter, cut: int
) -> None:
    """Wherever in a frame that is."""
    by_hand.write(frame(scope_of("http")))
    _, receive, _ = await owner.asked()
    data = frame(body(b"whole", more=True))
    by_hand.write(data[:cut])
    waiting = asyncio.ensure_future(receive())
    await turns(50)
    assert waiting.cancel()
    await asyncio.wait({waiting})
    by_hand.write(data[cut:] + frame(body(b"next")))
    assert await soon(receive()) == body(b"whole", more=True)
    assert await soon(receive()) == body(b"next")


@pytest.mark.rule("N1")
async def test_after_its_answer_nothing_that_a_client_says_is_kept(owner: Owner, passing: Pass) -> None:
    class Said(dict[str, Any]):
        """A message that can be watched."""

    client = Client(CONNECT)
    passing(client, scope_of("websocket"))
    _, receive, send = await owner.asked()
    await receive()
    await send(ACCEPT)
    await client.told()
    message = Said(type="websocket.receive", text="x")
    watched = weakref.ref(message)
    client.say(message)
    del message
    assert (await soon(receive()))["text"] == "x"
    assert watched() is None


class Torrent(Client):
    """A client that has no end."""

    count = 0

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        self.count += 1
        return body(b"%d" % self.count + b" " * 65536, more=True)


@pytest.mark.rule("N1")
async def test_what_the_owner_does_not_receive_is_left_with_the_client(owner: Owner, passing: Pass) -> None:
    client = Torrent()
    passing(client, scope_of("http"))
    await owner.asked()
    await turns()
    assert client.count < 32


@pytest.mark.rule("N1")
async def test_what_the_client_does_not_take_is_left_with_the_owner(owner: Owner, passing: Pass) -> None:
    class Slow(Client):
        room = asyncio.Event()

        async def send(self, message: Message) -> None:
            await self.room.wait()
            await super().send(message)

    client = Slow(body())
    passing(client, scope_of("http"))
    _, _, send = await owner.asked()
    count = 0

    async def pour() -> None:
        nonlocal count
        await send(START)
        while True:
            await send(chunk(b"x" * 65536))
            count += 1
            await asyncio.sleep(0)

    pouring = asyncio.create_task(pour())
    await turns()
    assert count < 32
    pouring.cancel()
    client.room.set()
    await client.told()
    for _ in range(count):
        assert len((await client.told())["body"]) == 65536


# The application's end -----------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N1")
async def test_an_application_that_raises_is_answered_for_with_500(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    server, _ = await apart(serve, owner=broken)
    assert (await server.ask("POST", "/", JSON, {})).status == 500
    denied = await server.knock("/")
    assert isinstance(denied, Answer)
    assert denied.status == 403
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


@on_both_servers
@pytest.mark.rule("N1")
async def test_an_application_that_says_nothing_is_answered_for_with_500(serve: Serve) -> None:
    async def mute(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    server, _ = await apart(serve, owner=mute)
    assert (await server.ask("POST", "/", JSON, {})).status == 500


@on_both_servers
@pytest.mark.rule("N1")
async def test_an_application_that_raises_in_a_stream_ends_it(serve: Serve) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START | {"headers": [(b"content-type", b"text/event-stream")]})
        await send(chunk(b": hello\n\n"))
        raise ZeroDivisionError

    server, _ = await apart(serve, owner=broken)
    stream = await server.stream("GET", "/")
    assert await stream.end() == []
    assert stream.raw == b": hello\n\n"


@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop])
@pytest.mark.rule("N1")
def test_an_application_that_sends_to_a_client_who_is_gone_is_stopped_without_a_word(
    near: str, caplog: pytest.LogCaptureFixture, loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    async def talkative(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):
            while True:
                await send(START)
        await send(START)

    async def run() -> None:
        doorway = Doorway(talkative, LIMIT)
        _, writer = await asyncio.open_unix_connection(await doorway.open(near))
        writer.write(frame(scope_of("http")))
        await until(lambda: len(asyncio.all_tasks()) == 2)
        writer.transport.abort()
        await until(lambda: len(asyncio.all_tasks()) == 1)
        await turns(10)
        await doorway.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(soon(run()))
    gc.collect()  # asyncio tells of a task's exception when it forgets the task
    assert caplog.records == []


@pytest.mark.rule("N1")
async def test_an_application_whose_client_is_gone_need_not_answer(owner: Owner, passing: Pass) -> None:
    client = Client(body(b"x", more=True), GONE)
    exchange = passing(client, scope_of("http"))
    _, receive, _ = await owner.asked()
    while await soon(receive()) != GONE:
        pass
    owner.leave()
    assert await soon(exchange) is None
    assert client.untold


@on_both_servers
@pytest.mark.rule("N1")
async def test_an_answer_that_does_not_wait_for_the_body_arrives(serve: Serve) -> None:
    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 413, b"too large")

    server, _ = await apart(serve, owner=hasty)
    wire = await server.wire()
    await wire.send("POST", "/", {"Content-Length": "3000000"})
    writing = asyncio.create_task(wire.write(b"x" * 3_000_000))
    answer = await wire.answer()
    assert (answer.status, answer.body) == (413, b"too large")
    wire.drop()
    await asyncio.gather(writing, return_exceptions=True)


@pytest.mark.rule("N1")
async def test_an_answer_survives_a_body_that_nobody_reads(owner: Owner, passing: Pass) -> None:
    """The owner has said all while its peer still writes: were it to close, the answer would be lost."""
    client = Client(*(body(b"x" * 65536, more=True) for _ in range(20)))
    exchange = passing(client, scope_of("http"))
    _, _, send = await owner.asked()
    await turns(200)
    await respond(send, 413, b"too large")
    owner.leave()
    assert await soon(exchange) is None
    assert (await client.told())["status"] == 413
    assert (await client.told())["body"] == b"too large"
    assert client.untold


# The owner's end -----------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_stream_whose_owner_goes_is_ended_and_its_client_resumes(serve: Serve) -> None:
    server, passing = await apart(serve)
    session = await server.started()
    stream = await session.events(session.start)
    await session.backend.say(note("one"))
    event = await stream.event()
    await passing.doorway.close()
    assert await stream.end() == []
    await session.backend.say(note("two"))
    passing.address = await passing.doorway.open(None)
    assert (await (await session.events(event.id)).message())["method"] == "two"


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_socket_whose_owner_goes_is_closed_1012(serve: Serve) -> None:
    server, passing = await apart(serve)
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await passing.doorway.close()
    assert await socket.closed() == 1012


@pytest.mark.rule("N1")
async def test_a_denial_whose_owner_goes_is_ended(owner: Owner, doorway: Doorway, passing: Pass) -> None:
    client = Client(CONNECT)
    exchange = passing(client, scope_of("websocket", extensions={"websocket.http.response": {}}))
    _, _, send = await owner.asked()
    start = {"type": "websocket.http.response.start", "status": 409, "headers": []}
    await send(start)
    assert await client.told() == start
    await doorway.close()
    assert await client.told() == {"type": "websocket.http.response.body", "body": b""}
    assert await soon(exchange) is None


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_request_whose_owner_goes_before_it_answers_can_be_served_by_another(serve: Serve) -> None:
    log = Fragile()
    held: list[bytes] = []

    async def instead(scope: Scope, receive: Receive, send: Send) -> None:
        assert RELAYED not in scope
        held.append(await read_body(receive, LIMIT, 30.0))
        await respond(send, 202, b"")

    server, passing = await apart(serve, instead=instead, log=log)
    session = await server.started()
    log.gate.clear()
    large = note("x", text="x" * 2**20)
    posting = asyncio.create_task(session.post(2, large))
    await soon(log.held.wait())
    await passing.doorway.close()
    assert (await posting).status == 202
    assert [msgspec.json.decode(data) for data in held] == [large]
    log.gate.set()


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_handshake_whose_owner_goes_before_it_answers_can_be_served_by_another(serve: Serve) -> None:
    async def instead(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == CONNECT
        await send(ACCEPT | {"subprotocol": "mcp.v1"})
        await send({"type": "websocket.close", "code": 4001})
        await receive()

    owner = Owner()
    server, passing = await apart(serve, owner, instead)
    knocking = asyncio.create_task(server.knock("/"))
    await owner.asked()
    await passing.doorway.close()
    socket = await knocking
    assert isinstance(socket, Socket)
    assert await socket.closed() == 4001


@pytest.mark.rule("N1")
async def test_a_body_whose_owner_goes_in_its_midst_is_received_again(
    owner: Owner, doorway: Doorway, passing: Pass
) -> None:
    client = Torrent()
    exchange = passing(client, scope_of("http"))
    await owner.asked()
    await turns()
    taken = client.count
    await doorway.close()
    again = await soon(exchange)
    assert again is not None
    assert [int((await soon(again()))["body"]) for _ in range(taken + 3)] == list(range(1, taken + 4))


@pytest.mark.rule("N1")
async def test_an_owner_that_hangs_is_waited_for_until_it_is_given_up(
    near: str, passing: Pass, given_up: asyncio.Future[None]
) -> None:
    """What it was sent comes again, and then what else the client says."""
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(near)
        hung.listen()
        client = Client(body(b"one", more=True), body(b"two", more=True))
        exchange = passing(client, scope_of("http"), near)
        await turns(100)
        assert not exchange.done()
        given_up.set_result(None)
        again = await soon(exchange)
    assert again is not None
    client.say(body(b"three"))
    assert [(await soon(again()))["body"] for _ in range(3)] == [b"one", b"two", b"three"]
    assert client.untold


@pytest.mark.rule("N1")
async def test_an_owner_given_up_after_its_first_answer_is_one_that_goes(
    owner: Owner, passing: Pass, given_up: asyncio.Future[None]
) -> None:
    client = Client(body())
    exchange = passing(client, scope_of("http"))
    _, receive, send = await owner.asked()
    await receive()
    await send(START)
    await client.told()
    given_up.set_result(None)
    assert await soon(exchange) is None
    assert await client.told() == END
    assert await soon(receive()) == GONE, "and is told that its client is"


@pytest.mark.rule("N1")
@pytest.mark.parametrize("kind", ["http.response", "websocket.http.response"])
async def test_an_answer_that_says_how_long_it_is_does_not_begin_without_its_body(
    owner: Owner, passing: Pass, given_up: asyncio.Future[None], kind: str
) -> None:
    """It could not be ended: so whoever goes on answers instead."""
    asked = body(b"one") if kind == "http.response" else CONNECT
    client = Client(asked)
    exchange = passing(client, scope_of(kind.partition(".")[0]))
    _, receive, send = await owner.asked()
    await receive()
    await send({"type": f"{kind}.start", "status": 202, "headers": [(b"Content-Length", b"2")]})
    await turns(100)
    assert client.untold
    given_up.set_result(None)
    again = await soon(exchange)
    assert again is not None
    assert await soon(again()) == asked


@pytest.mark.rule("N1")
async def test_an_owner_given_up_before_is_not_asked(
    owner: Owner, passing: Pass, given_up: asyncio.Future[None]
) -> None:
    given_up.set_result(None)
    client = Client(body(b"x"))
    again = await soon(passing(client, scope_of("http")))
    await turns(20)
    assert owner.unasked
    assert again is not None
    assert await soon(again()) == body(b"x")


@pytest.mark.rule("N1")
async def test_where_nobody_listens_nothing_is_taken_from_the_client(near: str, passing: Pass) -> None:
    client = Client(body(b"x"))
    again = await soon(passing(client, scope_of("http"), near))
    assert again is not None
    assert await soon(again()) == body(b"x")


@on_both_servers
@pytest.mark.rule("N1")
async def test_a_body_too_large_to_be_kept_is_refused_503_if_the_owner_goes(serve: Serve) -> None:
    owner = Owner()
    server, passing = await apart(serve, owner)
    passing.limit = 200_000
    asking = asyncio.create_task(server.ask("POST", "/", JSON, "x" * 200_000))
    _, receive, _ = await owner.asked()
    await read_body(receive, 2**20, 30.0)
    await passing.doorway.close()
    answer = await asking
    assert answer.reason == (503, "limit")
    assert answer.header("retry-after") == "1"


@pytest.mark.rule("N1")
async def test_a_body_too_large_to_be_kept_is_served_if_the_owner_stays(serve: Serve) -> None:
    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, b"%d" % len(await read_body(receive, 2**24, 30.0)))

    server, passing = await apart(serve, reading)
    passing.limit = 10
    answer = await server.ask("POST", "/", JSON, b"x" * 5_000_000)
    assert answer.body == b"5000000"


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.rule("N1")
async def test_what_is_too_large_for_a_frame_is_refused_503(owner: Owner, passing: Pass, kind: str) -> None:
    headers = [(b"x", b"x" * (LIMIT + 2**20))]
    scope = scope_of(kind, headers=headers, extensions={"websocket.http.response": {}})
    client = Client({"http": body(b"x"), "websocket": CONNECT}[kind])
    exchange = passing(client, scope)
    told = await client.told()
    assert told["type"].endswith("http.response.start")
    assert told["status"] == 503
    assert await soon(exchange) is None
    assert owner.unasked


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01"])
@pytest.mark.rule("N1")
async def test_after_what_is_no_frame_nothing_is_read(
    owner: Owner, by_hand: asyncio.StreamWriter, data: bytes
) -> None:
    """Too large, no msgpack, no message."""
    by_hand.write(frame(scope_of("http")))
    _, receive, _ = await owner.asked()
    by_hand.write(data)
    assert await soon(receive()) == GONE


@pytest.mark.rule("N1")
async def test_a_client_that_goes_before_its_owner_does_is_not_served_again(
    owner: Owner, doorway: Doorway, passing: Pass
) -> None:
    client = Client(body(b"x"), GONE)
    exchange = passing(client, scope_of("http"))
    _, receive, _ = await owner.asked()
    while await soon(receive()) != GONE:
        pass
    await doorway.close()
    assert await soon(exchange) is None
    assert client.untold


@pytest.mark.rule("N1")
async def test_a_passage_that_is_cancelled_is_a_client_that_is_gone(owner: Owner, passing: Pass) -> None:
    exchange = passing(Client(body()), scope_of("http"))
    _, receive, _ = await owner.asked()
    await receive()
    exchange.cancel()
    assert await soon(receive()) == GONE


@pytest.mark.rule("N1")
async def test_the_end_of_an_owner_waits_for_no_client_that_does_not_read(
    owner: Owner, doorway: Doorway, passing: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_PATIENCE", 0.01)

    class Stuck(Client):
        async def send(self, message: Message) -> None:
            if message == END:
                await asyncio.Event().wait()
            await super().send(message)

    client = Stuck(body())
    exchange = passing(client, scope_of("http"))
    _, _, send = await owner.asked()
    await send(START)
    await client.told()
    await doorway.close()
    assert await soon(exchange) is None


# Addresses -----------------------------------------------------------------------------------------


def _mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    """A process that hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.rule("N1")
async def test_nobody_else_can_connect_at_any_time(
    doorway: Doorway, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def listen(self: socket.socket, backlog: int) -> None:
        seen.append(_mode(self.getsockname()))
        super(socket.socket, self).listen(backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    address = await doorway.open(near)
    assert seen == [0o600], "before it listens"
    assert _mode(address) == 0o600


@pytest.mark.rule("N1")
async def test_the_socket_is_beside_the_log_and_goes_with_its_owner(doorway: Doorway, near: str) -> None:
    address = await doorway.open(near)
    assert address.startswith(f"{near}-")
    assert stat.S_ISSOCK(os.lstat(address).st_mode)
    await doorway.close()
    assert os.listdir(os.path.dirname(near)) == []
    await doorway.close()


@pytest.mark.rule("N1")
async def test_several_owners_of_one_log_have_sockets_of_their_own(owner: Owner, near: str) -> None:
    doorways = [Doorway(owner, LIMIT) for _ in range(3)]
    assert len({await doorway.open(near) for doorway in doorways}) == 3
    for doorway in doorways:
        await doorway.close()


@pytest.mark.rule("N1")
async def test_a_name_that_another_owner_has_stays_with_it(
    owner: Owner, doorway: Doorway, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.secrets, "token_hex", lambda length: "0" * 2 * length)
    address = await doorway.open(near)
    with pytest.raises(OSError, match="in use"):
        await Doorway(owner, LIMIT).open(near)
    assert await reachable(address) is Reach.LISTENS


@pytest.mark.rule("N1")
async def test_a_log_named_by_a_relative_path_has_an_absolute_address(
    doorway: Doorway, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.path.dirname(near))
    address = await doorway.open("log.db")
    monkeypatch.chdir("/")
    assert await reachable(address) is Reach.LISTENS


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("long", [True, False])
@pytest.mark.rule("N1")
async def test_without_room_beside_the_log_the_socket_has_a_directory_of_its_own(
    doorway: Doorway, near: str, long: bool
) -> None:
    if long:
        near += "x" * (101 - len(f"{near}-01234567.sock"))
    address = await doorway.open(near if long else None)
    directory = os.path.dirname(address)
    assert directory != os.path.dirname(near)
    assert (_mode(directory), _mode(address)) == (0o700, 0o600)
    assert await reachable(address) is Reach.LISTENS
    await turns(10)
    await doorway.close()
    with pytest.raises(FileNotFoundError):
        os.lstat(directory)


@pytest.mark.rule("N1")
async def test_a_path_that_just_fits_is_used(doorway: Doorway, near: str) -> None:
    near += "x" * (100 - len(f"{near}-01234567.sock"))
    address = await doorway.open(near)
    assert (len(address), await reachable(address)) == (100, Reach.LISTENS)


@pytest.mark.rule("N1")
async def test_where_no_socket_can_be_nothing_is_left(
    doorway: Doorway, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        await doorway.open(f"{near}/not/there")

    def chmod(path: str, mode: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chmod", chmod)
    with pytest.raises(PermissionError):
        await doorway.open(near)
    assert os.listdir(os.path.dirname(near)) == []


@pytest.mark.rule("N1")
async def test_an_owner_that_closes_is_never_taken_for_dead(
    doorway: Doorway, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on, for a moment, and may write: its file goes first, and then it stops listening."""
    address = await doorway.open(near)
    remove, heard = os.unlink, [0]

    def unlink(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            heard[0] += 1
        remove(path)

    monkeypatch.setattr(os, "unlink", unlink)
    await doorway.close()
    assert heard == [1]
    assert await reachable(address) is Reach.UNKNOWN


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.rule("N1")
async def test_who_is_let_in_while_the_doorway_closes_is_cut(
    owner: Owner, doorway: Doorway, near: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.start_unix_server
    doors: list[Callable[..., object]] = []

    async def spy(accept: Callable[..., Any], **more: Any) -> asyncio.Server:
        doors.append(accept)
        return await start(accept, **more)

    monkeypatch.setattr(asyncio, "start_unix_server", spy)
    await doorway.open(near)
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        theirs.sendall(frame(scope_of("http")))
        if late:
            await doorway.close()
        doors[0](reader, writer)
        await doorway.close()
        assert writer.is_closing()
        await turns(10)
        assert owner.unasked


OWNER: Final = """
import asyncio, sys
from gapless.server.relay import Doorway

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello", "more_body": True})
    await receive()
    await receive()

async def main():
    print(await Doorway(app, 1000).open(sys.argv[1]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def process(near: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process that listens, and its address."""
    arguments = (sys.executable, "-c", OWNER, near)
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    yield process, (await soon(process.stdout.readline())).decode().strip()
    if process.returncode is None:
        process.kill()
    await soon(process.communicate())


@pytest.mark.rule("N1")
async def test_a_killed_process_is_dead_and_buried(
    process: tuple[asyncio.subprocess.Process, str], passing: Pass
) -> None:
    owner, address = process
    client = Client(body())
    exchange = passing(client, scope_of("http"), address)
    assert (await client.told())["status"] == 200
    assert (await client.told())["body"] == b"hello"
    assert await reachable(address) is Reach.LISTENS
    owner.send_signal(signal.SIGKILL)
    assert await soon(exchange) is None
    assert await client.told() == END
    await soon(owner.wait())
    assert await reachable(address) is Reach.DEAD
    assert stat.S_ISSOCK(os.lstat(address).st_mode)
    await bury(address)
    assert os.listdir(os.path.dirname(address)) == []
    assert await reachable(address) is Reach.UNKNOWN


@pytest.mark.rule("N1")
async def test_a_process_that_stands_still_is_not_dead(
    process: tuple[asyncio.subprocess.Process, str], passing: Pass, given_up: asyncio.Future[None]
) -> None:
    owner, address = process
    owner.send_signal(signal.SIGSTOP)
    assert await reachable(address) is Reach.LISTENS
    exchange = passing(Client(body(b"x")), scope_of("http"), address)
    await turns(100)
    assert not exchange.done()
    given_up.set_result(None)
    again = await soon(exchange)
    assert again is not None
    assert await soon(again()) == body(b"x")


@pytest.mark.parametrize("path", ["", "/nowhere/log.db-1.sock", "/dev/null/log.db-1.sock", "x" * 200])
@pytest.mark.rule("N1")
async def test_of_what_cannot_be_reached_nothing_is_known(path: str) -> None:
    assert await reachable(path) is Reach.UNKNOWN


@pytest.mark.rule("N1")
async def test_only_a_socket_is_buried(near: str, address: str) -> None:
    os.mkdir(near)
    file, link = f"{near}/door.sock", f"{near}/link"
    os.close(os.open(file, os.O_CREAT))
    os.symlink(address, link)
    for path in (near, file, link, f"{near}-nothing", f"{file}/nothing", ""):
        await bury(path)
    assert sorted(os.listdir(near)) == ["door.sock", "link"]


@pytest.mark.rule("N1")
async def test_a_directory_that_was_made_for_a_socket_is_buried_with_it(owner: Owner) -> None:
    doorway = Doorway(owner, LIMIT)
    address = await doorway.open(None)
    await bury(address)
    with pytest.raises(FileNotFoundError):
        os.lstat(os.path.dirname(address))
    await doorway.close()
