"""The fault proxy knows requests and responses, and does to them what proxies do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from gapless.torture import faults, http_messages
from gapless.torture.faults import Direction, Link
from tests.torture.test_faults import MIB, paired, plain, settled, wired

UP, DOWN = Direction.TO_SERVER, Direction.TO_CLIENT

GET = (
    b"GET /mcp/session/x/events HTTP/1.1\r\nHost: h\r\nLast-Event-ID: 7.0.a\r\n"
    b"Accept: text/event-stream\r\n\r\n"
)
POST = b"POST /messages HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\nhello world"
CHUNKED = (
    b"POST /chunks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nA: b\r\n\r\n"
)
HANDSHAKE = (
    b"GET /mcp/session/x/events HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade, X-Hop\r\n"
    b"Upgrade: WebSocket\r\nX-Hop: 1\r\nSec-WebSocket-Key: k\r\nLast-Event-ID: 7.0.a\r\n\r\n"
)
SWITCHING = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"X-MCP-Resume-Cursor: 52\r\nSec-WebSocket-Accept: a\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"a\r\nid: 1\n\ndat\r\n"


class Requests:
    """Notes every request, and does something about it."""

    def __init__(self, action: Callable[[Link], None] = lambda link: None, at: int = 1) -> None:
        self.seen: list[str] = []
        self._action = action
        self._at = at

    def __call__(self, link: Link) -> None:
        self.seen.append(link.request)
        if len(self.seen) == self._at:
            self._action(link)


# Requests are seen ----------------------------------------------------------------------------------------


async def test_every_request_of_a_kept_alive_connection_is_seen() -> None:
    requests = Requests()
    async with paired(on_request=requests) as (_, client, server):
        for request in (GET, POST, CHUNKED, GET):
            await client.says(request)
            await server.gets(request)
            await server.says(OK)
            await client.gets(OK)
    event = "GET /mcp/session/x/events"
    assert requests.seen == [event, "POST /messages", "POST /chunks", event]


async def test_requests_are_seen_wherever_they_are_cut() -> None:
    stream = POST + GET + CHUNKED + HANDSHAKE
    for size in (1, 2, 3, 5, 64, len(stream)):
        requests = Requests()
        async with paired(on_request=requests) as (_, client, server):
            await client.says(*[stream[at : at + size] for at in range(0, len(stream), size)])
            await server.gets(stream)
        event = "GET /mcp/session/x/events"
        assert requests.seen == ["POST /messages", event, "POST /chunks", f"{event} upgrade"]


async def test_a_request_is_seen_before_anything_of_it_is_forwarded_and_with_its_headers() -> None:
    async with wired() as wire:
        link, client, server = await wire.pair()
        noted: list[bytes] = []

        def note(link: Link) -> None:
            noted.append(bytes(server.got))
            assert link.headers["last-event-id"] == "7.0.a"
            assert link.headers["host"] == "h"
            assert link.carries_events
            assert not link.upgraded

        wire.proxy.on_request = note
        await client.says(GET[:30], GET[30:60])
        assert server.got == b""
        assert not link.headers
        await client.says(GET[60:])
        await server.gets(GET)
        assert noted == [b""]


async def test_what_is_done_about_a_request_is_not_done_to_the_one_before() -> None:
    async with paired(on_request=Requests(lambda link: link.hold(UP), at=2)) as (link, client, server):
        await client.says(POST + GET)
        assert server.got == POST
        link.release(UP)
        await server.gets(POST + GET)


@pytest.mark.parametrize("action", [Link.reset, Link.close, lambda link: link.half_close(UP)])
async def test_a_request_that_its_link_is_ended_for_is_not_forwarded(action: Callable[[Link], None]) -> None:
    requests = Requests(action)
    async with paired(on_request=requests) as (_, client, server):
        await client.says(POST + GET)
        await server.until(lambda: server.finished or server.lost)
        assert server.got == b""
        assert requests.seen == ["POST /messages"]


async def test_nothing_is_seen_after_a_reset() -> None:
    told: list[str] = []
    requests = Requests(Link.reset)
    async with paired(on_request=requests, on_bytes=lambda *write: told.append(write[-1])) as (
        link,
        client,
        _,
    ):
        link.black_hole()
        await client.says(POST + GET)
        await client.gets_rst()
    assert requests.seen == ["POST /messages"]
    assert told == ["rst", "rst"]


async def test_a_request_in_flight_is_seen_and_forwarded_when_its_link_is_closed() -> None:
    requests = Requests()
    async with paired(on_request=requests) as (link, client, server):
        link.delay(UP, 3600)
        await client.says(GET)
        assert requests.seen == []
        link.close()
        await server.gets(GET)
        await server.gets_fin()
        assert requests.seen == ["GET /mcp/session/x/events"]


async def test_a_fault_asked_for_when_a_request_is_seen_counts_for_it() -> None:
    async with paired(on_request=Requests(lambda link: link.delay(UP, 3600))) as (link, client, server):
        await client.says(GET)
        assert server.got == b""
        link.delay(UP, 0)
        await server.gets(GET)


async def test_after_a_101_nothing_is_a_request() -> None:
    requests = Requests()
    async with paired(on_request=requests) as (link, client, server):
        await client.says(HANDSHAKE)
        await server.says(SWITCHING)
        await client.gets(SWITCHING)
        server.got.clear()
        link.strip_headers(UP, "Host")
        link.strip_headers(DOWN, "Content-Length")
        await client.says(GET, b"GET")
        await server.gets(GET + b"GET")
        await server.says(OK, b"HTTP")
        await client.gets(OK + b"HTTP")
        assert link.upgraded
    assert len(requests.seen) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02",
        b"get / HTTP/1.1\r\n",
        b"GET / HTTP/2.0\r\n",
        b"GET / HTTP/1.1\n",
        b"GET /\n",
        b"GET / HTML",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (64 * 1024),
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-6\r\n.",
    ],
)
async def test_what_is_no_request_passes_as_it_is_and_so_does_what_follows(garbage: bytes) -> None:
    requests = Requests()
    async with paired(on_request=requests) as (_, client, server):
        for at in range(0, len(garbage), 1000):
            await client.says(garbage[at : at + 1000])
        await server.gets(garbage)
        seen = len(requests.seen)
        await client.says(GET)
        await server.gets(GET)
        assert len(requests.seen) == seen


async def test_a_head_that_never_ends_passes_when_the_connection_does() -> None:
    async with paired() as (_, client, server):
        await client.says(GET[:40])
        assert server.got == b""
        client.transport.write_eof()
        await server.gets_fin()
        assert server.got == GET[:40]


async def test_a_response_passes_as_it_comes() -> None:
    async with paired() as (_, client, server):
        await server.says(SWITCHING[:20])
        await client.gets(SWITCHING[:20])
        await server.says(SWITCHING[20:])
        await client.gets(SWITCHING[20:])


# Headers are taken out ------------------------------------------------------------------------------------


async def test_a_stripped_handshake_arrives_as_a_plain_get() -> None:
    async with paired(on_request=Link.strip_upgrade) as (link, client, server):
        await client.says(HANDSHAKE[:50], HANDSHAKE[50:])
        await server.gets(
            b"GET /mcp/session/x/events HTTP/1.1\r\nHost: h\r\n"
            b"Sec-WebSocket-Key: k\r\nLast-Event-ID: 7.0.a\r\n\r\n"
        )
        assert link.upgraded  # that is what the client asked


async def test_the_handshake_is_stripped_and_not_a_request_before_it() -> None:
    async with paired() as (link, client, server):
        link.strip_upgrade()
        await client.says(GET)
        await server.gets(GET)
        await client.says(HANDSHAKE)
        assert b"Upgrade" not in server.got


async def test_headers_are_stripped_from_one_request() -> None:
    strip = Requests(lambda link: link.strip_headers(UP, "last-event-id", "ACCEPT"))
    async with paired(on_request=strip) as (_, client, server):
        await client.says(GET[:60], GET[60:])
        await server.gets(b"GET /mcp/session/x/events HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.says(GET)
        await server.gets(GET)


@pytest.mark.parametrize("cut", [len(SWITCHING), 5, 90, len(SWITCHING) - 1])
async def test_headers_are_stripped_from_one_response_wherever_that_is_cut(cut: int) -> None:
    async with paired() as (link, client, server):
        link.strip_headers(DOWN, "X-MCP-Resume-Cursor")
        await server.says(SWITCHING[:cut], SWITCHING[cut:])
        await client.gets(SWITCHING.replace(b"X-MCP-Resume-Cursor: 52\r\n", b""))


async def test_while_headers_are_to_be_stripped_a_head_passes_whole_and_after_that_as_it_comes() -> None:
    async with paired() as (link, client, server):
        link.strip_headers(DOWN, "Content-Type")
        await server.says(OK[:20])
        assert client.got == b""
        await server.says(OK[20:])
        await client.gets(OK)
        await server.says(OK[:20])
        await client.gets(OK[:20])


async def test_a_head_that_was_to_be_stripped_and_never_ends_passes_when_the_connection_does() -> None:
    async with paired() as (link, client, server):
        link.strip_headers(DOWN, "Content-Type")
        await server.says(OK[:20])
        server.transport.write_eof()
        await client.gets_fin()
        assert client.got == OK[:20]


async def test_headers_are_stripped_from_the_next_response_that_is_not_interim() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nX-A: 1\r\n\r\n"
    async with paired() as (link, client, server):
        await server.says(OK[:20])
        await client.gets(OK[:20])
        link.strip_headers(DOWN, "Content-Length", "X-A", "X-B")
        await server.says(OK[20:])
        await client.gets(OK[20:])
        await server.says(early + b"HTTP/1.1 204 No Content\r\nX-A: 1\r\nX-B: 2\r\nX-C: 3\r\n\r\n" + OK)
        await client.gets(early + b"HTTP/1.1 204 No Content\r\nX-C: 3\r\n\r\n" + OK)


# Answers of the proxy's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400, 403, 502])
async def test_a_handshake_is_answered_by_the_proxy_and_never_reaches_the_server(status: int) -> None:
    async with wired(on_request=lambda link: link.answer(status)) as wire:
        link, client, server = await wire.pair()
        await client.says(HANDSHAKE)
        await client.gets_fin()
        head, _, body = bytes(client.got).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\ncontent-type: text/plain" in head
        assert b"\r\ncontent-length: 0" in head
        assert body == b""
        await server.gets_fin()
        assert server.got == b""
        assert not link.open
        assert wire.proxy.links == []


async def test_the_body_of_an_answered_request_does_not_reach_the_server_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "_LINGER", 3600)

    def answer(link: Link) -> None:
        link.answer(404, "text/html", b"<p>no", {"X-Proxy": "p", "Content-Length": "5"})

    async with paired(on_request=answer) as (_, client, server):
        body = bytes(16 * MIB)
        client.transport.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body))
        for end in (client, server):
            end.transport.set_write_buffer_limits(high=0)
            end.transport.write(body)
            await end.until(lambda end=end: end.writable)
        await client.gets_fin()  # and no reset, though the body was not waited for
        assert client.got == (
            b"HTTP/1.1 404 Not Found\r\ncontent-type: text/html\r\ncontent-length: 5\r\n"
            b"connection: close\r\nx-proxy: p\r\n\r\n<p>no"
        )
        await server.gets_fin()
        assert server.got == b""
        await settled()
        assert not client.lost


async def test_one_request_is_answered_by_the_proxy_and_the_one_before_by_the_server() -> None:
    async with paired(on_request=Requests(lambda link: link.answer(404), at=2)) as (_, client, server):
        await client.says(GET)
        await server.gets(GET)
        await server.says(OK)
        await client.gets(OK)
        await client.says(POST[:50], POST[50:])
        await client.gets_fin()
        assert client.got.startswith(b"HTTP/1.1 404")
        await server.gets_fin()
        assert server.got == b""


async def test_an_answer_can_be_held() -> None:
    def answer(link: Link) -> None:
        link.hold(DOWN)
        link.answer(502)

    async with paired(on_request=answer) as (link, client, _):
        await client.says(GET)
        assert client.got == b""
        assert not client.finished
        link.release(DOWN)
        await client.gets_fin()
        assert client.got.startswith(b"HTTP/1.1 502")


# Requests come twice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [POST, CHUNKED, GET], ids=["counted", "chunked", "none"])
async def test_a_repeated_request_reaches_the_server_twice_and_is_answered_once(request_: bytes) -> None:
    async with wired(on_request=Requests(Link.repeat)) as wire:
        link, client, server = await wire.pair()
        await client.says(request_[:30], request_[30:-1])
        assert wire.servers.empty()
        await client.says(request_[-1:])
        await server.gets(request_)
        second = await wire.server()
        await second.gets(request_)
        await second.says(OK)
        await second.until(lambda: second.finished or second.lost)
        await server.says(OK)
        await client.gets(OK)
        await client.says(POST)
        await server.gets(POST)
        assert wire.servers.empty()
        assert wire.proxy.links == [link]


async def test_a_request_is_repeated_as_it_was_forwarded_and_though_its_link_is_cut() -> None:
    def strip(link: Link) -> None:
        link.strip_headers(UP, "Host")
        link.repeat()
        link.arm(UP, b"world", lambda link: link.hold(UP), before=True)

    async with wired(on_request=Requests(strip)) as wire:
        link, client, server = await wire.pair()
        await client.says(POST)
        assert server.got == POST.replace(b"Host: h\r\n", b"").removesuffix(b"world")
        assert wire.servers.empty()
        link.release(UP)
        second = await wire.server()
        link.reset()
        await second.gets(POST.replace(b"Host: h\r\n", b""))


async def test_a_request_that_is_swallowed_is_not_repeated() -> None:
    async with wired(on_request=Link.repeat) as wire:
        link, client, _ = await wire.pair()
        link.black_hole(UP)
        await client.says(POST)
        assert wire.servers.empty()


async def test_a_request_that_is_too_large_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_messages, "_GATHERED", len(POST) - 1)
    async with wired(on_request=Link.repeat) as wire:
        _, client, server = await wire.pair()
        await client.says(POST)
        await server.gets(POST)
        await settled()
        assert wire.servers.empty()


async def test_an_endless_answer_to_a_repeated_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_REPEAT", 0.05)
    async with wired(on_request=Link.repeat) as wire:
        _, client, _ = await wire.pair()
        await client.says(GET)
        second = await wire.server()
        await second.says(STREAM, EVENT)
        await second.until(lambda: second.finished or second.lost)


# Responses come late --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        OK,
        STREAM + EVENT + b"0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    ],
)
async def test_nothing_of_a_buffered_response_passes_before_its_end(response: bytes) -> None:
    async with paired(on_request=Requests(Link.buffer_response)) as (_, client, server):
        await client.says(GET)
        await server.says(response[:30], response[30:-1])
        assert client.got == b""
        await server.says(response[-1:])
        await client.gets(response)
        await server.says(OK[:-1])  # it was that response only
        await client.gets(OK[:-1])


async def test_a_response_to_a_head_request_has_no_body() -> None:
    async with paired(on_request=Link.buffer_response) as (_, client, server):
        await client.says(GET.replace(b"GET", b"HEAD"))
        await server.says(OK[:-2])
        await client.gets(OK[:-2])


@pytest.mark.parametrize("cut", ["fin", "rst", "close"])
async def test_a_buffered_event_stream_shows_nothing_until_it_is_cut(cut: str) -> None:
    async with paired() as (link, client, server):
        link.buffer_response()
        await server.says(STREAM, *[EVENT] * 10)
        assert client.got == b""
        if cut == "fin":
            server.transport.write_eof()
        elif cut == "rst":
            server.resets()
        else:
            link.close()
        await client.gets_fin()
        assert client.got == STREAM + EVENT * 10


async def test_the_rest_of_a_response_can_be_buffered() -> None:
    async with paired() as (link, client, server):
        await server.says(STREAM, EVENT)
        await client.gets(STREAM + EVENT)
        link.buffer_response()
        await server.says(EVENT)
        assert client.got == b""
        await server.says(b"0\r\n\r\n")
        await client.gets(EVENT + b"0\r\n\r\n")


async def test_a_response_that_is_too_large_is_buffered_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_messages, "_GATHERED", len(STREAM) + len(EVENT))
    async with paired() as (link, client, server):
        link.buffer_response()
        await server.says(STREAM, EVENT)
        assert client.got == b""
        await server.says(EVENT)
        await client.gets(STREAM + EVENT + EVENT)


# The 101 --------------------------------------------------------------------------------------------------


async def test_a_101_can_be_eaten() -> None:
    def eat(link: Link) -> None:
        link.arm(DOWN, b"HTTP/1.1 101", Link.black_hole, before=True)

    async with paired(on_request=eat) as (link, client, server):
        await client.says(HANDSHAKE)
        await server.gets(HANDSHAKE)
        await server.says(SWITCHING[:7], SWITCHING[7:], b"frames")
        await client.says(b"frames")
        assert client.got == b""
        assert server.got == b""
        assert not client.finished
        assert link.open


async def test_a_101_can_be_held() -> None:
    def hold(link: Link) -> None:
        link.arm(DOWN, b"HTTP/1.1 101", lambda link: link.hold(DOWN), before=True)

    async with paired(on_request=hold) as (link, client, server):
        await client.says(HANDSHAKE)
        await server.says(SWITCHING[:7], SWITCHING[7:], b"frames")
        assert client.got == b""
        link.release(DOWN)
        await client.gets(SWITCHING + b"frames")


@pytest.mark.parametrize("test", plain(globals()))
def test_it_is_so_on_uvloop_too(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
