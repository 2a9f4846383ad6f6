"""What a server takes on: each limit has its own refusal, and costs only whoever went over it (§8)."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import pytest

from gapless.auth.base import Principal, Verifier
from gapless.log.base import OwnerId, SessionKey
from gapless.log.memory import MemoryLog
from gapless.protocol.cursor import Link
from gapless.server.rate import Rate
from tests.server.harness import BOTH, JSON, Serve, Server, Wire, note, request, result, soon

INIT = request(
    0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": "x", "version": "1"}
)


class Named(Verifier):
    """Everybody is who they say."""

    async def verify(self, token: str) -> Principal:
        return Principal(token)


class Slow(MemoryLog):
    """A log that others get ahead of."""

    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        await asyncio.sleep(0.05)
        await super().create(key, record, link, owner)


async def refused(wire: Wire) -> tuple[int, str]:
    """What the last request of a connection is told; the connection is over then."""
    answer = await wire.answer()
    assert answer.header("connection") == "close"
    assert await wire.rest() == b""
    return answer.reason


async def passes(server: Server, seconds: float) -> None:
    """Time, in which the server has something else to do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await server.ask("GET", "/healthz")


async def lives(server: Server) -> None:
    """The server serves others as before."""
    session = await server.started()
    assert (await session.post(2, note())).status == 202


# Sessions ----------------------------------------------------------------------------------------


async def test_sessions_are_opened_up_to_a_number_and_again_once_one_is_over(serve: Serve) -> None:
    server = await serve(max_sessions=2)
    first, streams = await server.open(), await server.initialized()
    for answer in (
        await server.ask("POST", "/mcp/session"),
        await server.ask("POST", "/mcp", JSON | BOTH, INIT),
    ):
        assert answer.reason == (503, "limit")
        assert answer.header("retry-after") == "1"
    assert (await first.delete()).status == 204
    await server.open()
    assert (await streams.post(note())).status == 202


async def test_a_principal_has_a_share_of_them(serve: Serve) -> None:
    server = await serve(max_principal_sessions=1, verifier=Named())
    server.headers["Authorization"] = "Bearer ann"
    await server.open()
    answer = await server.ask("POST", "/mcp/session")
    assert answer.reason == (429, "limit")
    assert answer.header("retry-after") == "1"
    server.headers["Authorization"] = "Bearer bob"
    await server.open()
    assert not server.app.sessions._opening  # nothing is kept of who has none


async def test_nobody_has_a_share_where_everybody_is_anonymous(serve: Serve) -> None:
    server = await serve(max_principal_sessions=1)
    await server.open()
    await server.open()


async def test_sessions_that_are_being_opened_count(serve: Serve) -> None:
    server = await serve(Slow(), max_sessions=3)
    answers = await asyncio.gather(*(server.ask("POST", "/mcp/session") for _ in range(8)))
    assert sorted(answer.status for answer in answers) == [201] * 3 + [503] * 5


async def test_each_session_of_a_stdio_server_counts_as_a_process(serve: Serve) -> None:
    server = await serve(max_children=1)
    server.backends.spawns = True
    await server.open()
    answer = await server.ask("POST", "/mcp/session")
    assert answer.reason == (503, "limit")
    assert "1 sessions with an MCP server each" in answer.json()["error"]["message"]


# One session -------------------------------------------------------------------------------------


async def test_a_session_has_so_many_connections(serve: Serve) -> None:
    server = await serve(max_session_connections=2)
    session = await server.started()
    held = [await session.events(), await session.events()]
    denied = await session.denied(session.start)
    for answer in (await session.get(), denied):
        assert answer.reason == (429, "limit")
    held[0].drop()
    status = 429
    while status == 429:  # until the server has seen it go
        wire = await server.wire()
        await wire.send("GET", f"{session.base}/events", {"Accept": "text/event-stream"})
        status = (await wire.head()).status
    assert status == 200
    await lives(server)


async def test_so_many_streams_of_the_stream_view(serve: Serve) -> None:
    server = await serve(max_session_connections=1)
    streams = await server.initialized()
    await streams.listen()
    for answer in (await streams.get(), await streams.post(request(7))):
        assert answer.reason == (429, "limit")
    assert (await streams.post(note())).status == 202


@pytest.mark.rule("L6")
async def test_a_request_too_many_uses_its_number_and_is_answered_with_an_error(serve: Serve) -> None:
    server = await serve(max_requests=2)
    session = await server.started()
    stream = await session.events(session.start)
    for number in (2, 3):
        assert (await session.post(number, request(number))).status == 202
    answer = await session.post(4, request(4))
    assert answer.reason == (429, "limit")
    assert answer.data["received"] == 4
    assert answer.data["retryable"]
    told = await stream.message()
    assert (told["id"], told["error"]["code"], told["error"]["data"]) == (4, -32000, {"reason": "limit"})
    assert (await session.post(5, note())).status == 202  # what is no request is taken
    assert [(await session.backend.take())["id"] for _ in range(2)] == [2, 3]
    await session.backend.emit(result(2))
    assert (await stream.message())["id"] == 2
    assert (await session.post(6, request(6))).status == 202


@pytest.mark.rule("L6")
async def test_a_request_too_many_on_a_socket(serve: Serve) -> None:
    server = await serve(max_requests=1)
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, request(2))
    await socket.say(3, request(3))
    told: dict[str | None, Any] = {}
    while not told.keys() >= {"refused", "message"}:
        block = await socket.block()
        told[block.event] = json.loads(block.data or b"{}")
    refused_, message = told["refused"], told["message"]
    assert (refused_["n"], refused_["error"]["data"]["reason"]) == (3, "limit")
    assert (message["id"], message["error"]["data"]) == (3, {"reason": "limit"})
    await socket.say(4, note())
    assert (await session.post(4, note())).status == 202


@pytest.mark.rule("M6")
async def test_a_request_too_many_of_the_stream_view_is_refused_on_its_own_post(serve: Serve) -> None:
    server = await serve(max_requests=1)
    streams = await server.initialized()
    await streams.call(1)
    answer = await streams.post(request(2))
    assert answer.reason == (429, "limit")
    assert answer.json()["id"] == 2
    assert answer.header("retry-after") == "1"


@pytest.mark.rule("L6", "N2")
async def test_a_session_is_subscribed_to_so_much(serve: Serve) -> None:
    server = await serve(max_subscriptions=2)
    session = await server.started()
    for number in (2, 3):
        wanted = request(number, "resources/subscribe", uri=f"a:{number}")
        assert (await session.post(number, wanted)).status == 202
        await session.backend.take()
    assert (await session.post(4, request(4, "resources/subscribe", uri="a:4"))).reason == (429, "limit")
    assert (await session.post(5, request(5, "resources/unsubscribe", uri="a:2"))).status == 202
    await session.backend.take()
    assert (await session.post(6, request(6, "resources/subscribe", uri="a:6"))).status == 202
    assert (await session.backend.take())["id"] == 6


@pytest.mark.rule("L6")
async def test_client_processes_that_come_and_go_fill_no_memory(server: Server) -> None:
    session = await server.started()
    for number in range(2, 302):
        assert (await session.post(number, note(), process=f"p{number}")).status == 202
    (live,) = server.app.sessions.all()
    assert len(live.machine.inbox.retired) == 256
    assert (await session.post(302, note(), process="p300")).reason == (409, "message-conflict")


async def test_upgrades_are_attempted_so_often(serve: Serve) -> None:
    server = await serve(max_upgrades_per_minute=2)
    session = await server.started()
    assert [(await session.upgrade("nonsense")).status for _ in range(2)] == [400] * 2
    answer = await session.upgrade(session.start)
    assert answer.reason == (429, "limit")
    assert 20 <= int(answer.header("retry-after")) <= 30
    assert (await session.denied(session.start)).reason == (429, "limit")
    assert (await (await server.started()).upgrade(session.start)).status == 409  # another has its own


def test_a_rate_lets_as_many_through_as_time_allows() -> None:
    rate = Rate(60, 0.0)
    assert [rate.take(0.0) for _ in range(61)] == [0.0] * 60 + [1.0]
    assert [rate.take(0.5), rate.take(1.0), rate.take(1.0)] == [0.5, 0.0, 1.0]
    assert [rate.take(1000.0) for _ in range(61)] == [0.0] * 60 + [1.0]  # no more than a minute is saved up


# Connections -------------------------------------------------------------------------------------


async def test_a_url_is_so_long(serve: Serve) -> None:
    server = await serve(max_url_bytes=100)
    at_most = "/mcp/session?" + "x" * (100 - len("/mcp/session?"))
    assert (await server.ask("POST", at_most)).status == 201
    wire = await server.wire()
    await wire.send("POST", at_most + "x")
    assert await refused(wire) == (414, "url-too-long")
    await lives(server)


async def test_headers_are_so_large(serve: Serve) -> None:
    server = await serve(max_header_bytes=1000)
    assert (await server.ask("POST", "/mcp/session", {"X-Padding": "x" * 900})).status == 201
    wire = await server.wire()
    await wire.send("POST", "/mcp/session", {"X-Padding": "x" * 1000}, b"body")
    assert await refused(wire) == (431, "headers-too-large")
    await lives(server)


@pytest.mark.parametrize(
    ("start", "more", "expected"),
    [
        (b"GET /", b"x" * 100, (414, "url-too-long")),
        (b"GET / HTTP/1.1\r\n", b"X-Padding: x\r\n" * 10, (431, "headers-too-large")),
        (b"GET / HTTP/1.1\r\nX-Padding: ", b"x" * 100, (431, "headers-too-large")),
        (b"\r\n", b"\r\n" * 50, (431, "headers-too-large")),
    ],
    ids=["URL", "headers", "header", "blank lines"],
)
async def test_what_never_ends_is_refused_before_it_does(
    serve: Serve, start: bytes, more: bytes, expected: tuple[int, str]
) -> None:
    server = await serve(max_header_bytes=1000, max_url_bytes=900)
    wire = await server.wire()
    await wire.write(start)
    seen = asyncio.create_task(refused(wire))
    for _ in range(200):
        if seen.done():
            break
        await wire.write(more)
        await server.ask("GET", "/healthz")  # a turn of the server's, so that it comes in pieces
    assert await seen == expected


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
    ],
    ids=["nothing", "a blank line", "half a line", "half a handshake"],
)
async def test_headers_are_waited_for_so_long(serve: Serve, sent: bytes) -> None:
    server = await serve(header_timeout=0.1)
    wire = await server.wire()
    if sent:
        await wire.write(sent)
    assert await refused(wire) == (408, "request-timeout")


async def test_so_are_those_of_the_next_request(serve: Serve) -> None:
    server = await serve(header_timeout=0.1)
    wire = await server.wire()
    await wire.send("GET", "/healthz")
    assert (await wire.answer()).status == 200
    await wire.write(b"\r\n")  # which ends the time that an idle connection has
    assert await refused(wire) == (408, "request-timeout")


async def test_a_stream_outlives_the_time_for_headers(serve: Serve) -> None:
    server = await serve(header_timeout=0.05, body_timeout=0.05, keepalive=0.2)
    session = await server.started()
    stream = await session.events()
    await stream.beat()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.beat()


async def test_a_body_is_waited_for_so_long(serve: Serve) -> None:
    server = await serve(body_timeout=0.1)
    session = await server.started()
    for target in (f"{session.base}/messages", "/mcp/session", "/mcp"):
        wire = await server.wire()
        await wire.send("POST", target, JSON | BOTH | {"Content-Length": "9"}, b"{")
        assert await refused(wire) == (408, "request-timeout")
    await lives(server)


async def test_a_body_that_comes_earns_its_time(serve: Serve) -> None:
    server = await serve(body_timeout=1.0)
    session = await server.started()
    wire = await server.wire()
    size = 48 * 1024
    await wire.send(
        "POST",
        f"{session.base}/messages",
        JSON | {"Content-Length": str(size), "Mcp-Client": "p", "Mcp-Message-Number": "2"},
    )
    for _ in range(size // 1024):
        await wire.write(b" " * 1024)
        await passes(server, 0.03)
    assert (await wire.answer()).reason == (400, "malformed")


async def test_a_body_that_nobody_reads_is_waited_for_so_long(serve: Serve) -> None:
    server = await serve(body_timeout=0.1)
    wire = await server.wire()
    await wire.send("GET", "/healthz", {"Content-Length": "1000"}, b"x")
    assert (await wire.answer()).status == 200
    rest = asyncio.create_task(wire.rest())
    with suppress(ConnectionError):  # a byte may meet the end on its way
        for _ in range(900):
            if rest.done():
                break
            await wire.write(b"x")
            await passes(server, 0.01)
    with suppress(ConnectionError):
        assert await soon(rest) == b""


async def test_one_that_comes_all_the_same_costs_nothing(serve: Serve) -> None:
    server = await serve(body_timeout=0.5)
    wire = await server.wire()
    await wire.send("GET", "/healthz", {"Content-Length": "2"})
    assert (await wire.answer()).status == 200
    await wire.write(b"ab")
    await passes(server, 0.7)
    await wire.send("GET", "/healthz")
    assert (await wire.answer()).status == 200


async def test_what_waits_behind_a_stream_is_not_too_slow(serve: Serve) -> None:
    server = await serve(header_timeout=0.05, keepalive=0.2)
    session = await server.started()
    wire = await server.wire()
    get = f"GET {session.base}/events HTTP/1.1\r\nHost: {server.host}\r\nAccept: text/event-stream\r\n\r\n"
    await wire.write(get.encode() * 2 + b"GET / HT")
    assert (await wire.head()).status == 200
    await wire.until(b":\n\n")
    await wire.until(b":\n\n")
    (live,) = server.app.sessions.all()
    wire.drop()
    while live.machine.connections:  # until the server has seen it go, with a request behind it
        await server.ask("GET", "/healthz")


async def test_headers_behind_a_stream_are_so_large_however_slowly_they_come(serve: Serve) -> None:
    server = await serve(header_timeout=0.02, max_header_bytes=2000, keepalive=60.0)
    session = await server.started()
    wire = await server.wire()
    get = f"GET {session.base}/events HTTP/1.1\r\nHost: {server.host}\r\nAccept: text/event-stream\r\n\r\n"
    await wire.write(get.encode() + b"GET / HTTP/1.1\r\n")
    assert (await wire.head()).status == 200
    rest = asyncio.create_task(wire.rest())
    for _ in range(50):
        if rest.done():
            break
        await wire.write(b"X-Padding: %b\r\n" % (b"x" * 86))
        await passes(server, 0.03)
    assert b"HTTP/1.1" not in await rest


async def test_the_answer_before_it_does_not_hurry_a_body(serve: Serve) -> None:
    server = await serve(body_timeout=1.0)
    wire = await server.wire()
    head = f"POST /mcp/session HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: 4096\r\n\r\n"
    await wire.write(f"GET /healthz HTTP/1.1\r\nHost: {server.host}\r\n\r\n{head}".encode())
    assert (await wire.answer()).status == 200
    for _ in range(8):
        await wire.write(b" " * 512)
        await passes(server, 0.25)
    assert (await wire.answer()).status == 201


async def test_only_headers_count_as_such(serve: Serve) -> None:
    server = await serve(max_header_bytes=300)
    wire = await server.wire()
    await wire.send(
        "POST", "/mcp/session", body=b" " * 500 + b"GET /healthz HT", headers={"Content-Length": "500"}
    )
    assert (await wire.answer()).status == 201
    await wire.write(b"TP/1.1\r\nHost: " + server.host.encode() + b"\r\n\r\n")
    assert (await wire.answer()).status == 200


async def test_there_are_so_many_connections(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cli.connections._LINGER", 60.0)
    server = await serve(max_connections=2)
    held = [await server.wire(), await server.wire()]
    for wire in held:
        await wire.send("GET", "/healthz")
        assert (await wire.answer()).status == 200
    for _ in range(3):  # which stay, and keep nobody out
        assert await refused(await server.wire()) == (503, "limit")
    held[0].drop()
    status = 503
    while status == 503:  # until the server has seen them go
        status = (await server.ask("GET", "/healthz")).status
    assert status == 200


# What cannot be read -----------------------------------------------------------------------------


async def test_what_is_no_request_is_refused_with_a_reason(server: Server) -> None:
    wire = await server.wire()
    await wire.write(b"nonsense\r\n\r\n")
    assert await refused(wire) == (400, "malformed")
    counted = (await server.ask("GET", "/metrics")).body
    assert b'gapless_refusals_total{reason="malformed"} 1.0' in counted


async def test_nothing_is_written_into_a_stream_that_is_running(server: Server) -> None:
    session = await server.started()
    wire = await server.wire()
    await wire.send("GET", f"{session.base}/events", {"Accept": "text/event-stream"})
    assert (await wire.head()).status == 200
    await wire.write(b"nonsense\r\n\r\n")
    assert b"HTTP/1.1" not in await wire.rest()
