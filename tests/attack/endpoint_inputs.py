"""Bad inputs to the endpoints: requests that HTTP has nothing against, many on one connection."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final
from urllib.parse import quote_from_bytes

from tests.attack.shapes import BODIES, EVENTS, JSON, VALUES, blocks, json_text, mutated, request, upgrade
from tests.attack.target import SESSION, STREAM, Seat, Target
from tests.attack.volley import Family, Volley

__all__ = ["ENDPOINT_FAMILIES", "handshake"]

_TYPES: Final = (
    *(
        b"",
        b"text/plain",
        b"application/json; charset=utf-16",
        b"application/jsonp",
        b"application/x-www-form-urlencoded",
    ),
    *(
        b"multipart/form-data; boundary=x",
        b"APPLICATION/JSON",
        b"application/json,text/plain",
        b"*/*",
        b"\xff",
        b"json",
        b";",
    ),
)
_ACCEPTS: Final = (
    b"*/*", JSON + b", " + EVENTS, JSON, EVENTS, b"", b"text/html", b"application/*", b"*/*;q=0", b",,;",
    b"\xff",
)  # fmt: skip
_NUMBERS: Final = (
    *(
        b"",
        b"0",
        b"-1",
        b"+1",
        b"01",
        b"1.0",
        b"1e3",
        b"0x1",
        b" 1",
        b"9223372036854775807",
        b"9223372036854775808",
        b"1,2",
    ),
    *(b"\xd9\xa1", b"1" * 400, b"NaN", b"null", b"1.0.a193f6b6c59d5344", b"\xff", b"1;2", b"1 2"),
)
_CLIENTS: Final = (
    b"", b"attack", b"attack", b"other", b"x" * 128, b"x" * 129, b"\xff", b" ", b"a,b", b"\xc3\xbc",
)  # fmt: skip
_REVISIONS: Final = (
    b"2025-11-25", b"2025-06-18", b"2025-03-26", b"2024-11-05", b"2026-07-28", b"", b"x", b"\xff", b"9" * 500,
)  # fmt: skip
_NONCES: Final = (
    b"null", b'""', b'"%b"' % (b"x" * 128), b'"%b"' % (b"x" * 129), b"1", b"[]", b'"\\ud800"', b'"\\u0000"',
    b'"n1"',
)  # fmt: skip
_PROTOCOLS: Final = (b'"mcp.v1"', b'"mcp.v2"', b"null", b'"MCP.V1"', b'["mcp.v1"]', b'""')
_LARGE: Final = b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":"%b"}}' % (b"y" * 70_000)
_HEADERS: Final = [(b"Content-Type", JSON)]


def _many(
    one: Callable[[Random, Target, Seat], bytes], *, streams: bool, most: int = 40
) -> Callable[..., Volley]:
    """Volleys of such requests, all about one session."""

    def make(random: Random, target: Target) -> Volley:
        seat = target.seat(random, streams=streams)
        count = random.randint(1, most)
        data = b"".join(one(random, target, seat) for _ in range(count))
        return Volley([data], count, seat=seat, plain=True)

    return make


def _message(random: Random, target: Target, seat: Seat) -> bytes:
    """A message that is none, or has a number that is none, or of nobody."""
    headers = [(b"Content-Type", JSON if random.random() < 0.9 else random.choice(_TYPES))]
    if random.random() < 0.95:
        headers.append((b"Mcp-Client", random.choice(_CLIENTS) if random.random() < 0.1 else b"attack"))
    if random.random() < 0.95:
        near = b"%d" % (seat.number + random.choice((0, 0, 0, -1, -2, 1, 2, 50)))
        headers.append((b"Mcp-Message-Number", near if random.random() < 0.75 else random.choice(_NUMBERS)))
    body = _LARGE if random.random() < 0.002 else json_text(random)
    return request(b"POST", seat.path + b"/messages", headers, body)


def _several(random: Random, target: Target, seat: Seat) -> bytes:
    """Messages in one body, as blocks that are broken, void, or of wrong numbers."""
    headers = [(b"Content-Type", EVENTS), (b"Mcp-Client", b"attack")]
    return request(
        b"POST", seat.path + b"/messages", headers, blocks(random, seat.number, target.cursor(random, seat))
    )


def _ack(random: Random, target: Target, seat: Seat) -> bytes:
    cursor = target.cursor(random, seat)
    body = random.choice(
        (b'{"cursor":"%b"}' % cursor, b'{"cursor":%b}' % random.choice(VALUES), random.choice(BODIES))
    )
    headers = _HEADERS if random.random() < 0.9 else [(b"Content-Type", random.choice(_TYPES))]
    return request(b"POST", seat.path + b"/ack", headers, body)


def _offer(random: Random, target: Target, seat: Seat) -> bytes:
    members = [
        b'"cursor":"%b"' % target.cursor(random, seat),
        b'"protocol":' + random.choice(_PROTOCOLS),
        b'"negotiation":' + random.choice(_NONCES),
    ]
    body = b"{" + b",".join(random.sample(members, random.choice((3, 3, 3, 2, 1, 0)))) + b"}"
    if random.random() < 0.2:
        body = random.choice(
            (random.choice(BODIES), mutated(random, body), b'{"cursor":%b}' % random.choice(VALUES))
        )
    return request(b"POST", seat.path + b"/upgrade", _HEADERS, body)


def _cursors(random: Random, target: Target) -> Volley:
    """An event stream from a cursor that is not one's own, or none; if it is one, the stream runs."""
    streams = random.random() < 0.4
    seat = target.seat(random, streams=streams)
    data, count = b"", random.randint(1, 16)
    for _ in range(count):
        cursor = target.cursor(random, seat)
        headers = [(b"Accept", EVENTS), (b"Last-Event-ID", cursor)]
        if random.random() < 0.1:
            headers.append((b"Last-Event-ID", target.cursor(random, seat)))
        if streams:
            headers.append((b"Mcp-Session-Id", seat.token))
            data += request(b"GET", STREAM, headers)
        else:
            if random.random() < 0.7 and cursor in seat.cursors:
                headers[1] = (b"Last-Event-ID", cursor + b"x")  # else a stream runs, and the rest is not read
            data += request(b"GET", seat.path + b"/events" + random.choice((b"", b"", b"?ticket=x")), headers)
    return Volley([data], count, seat=seat, plain=True)


def _stream(random: Random, target: Target, seat: Seat) -> bytes:
    """A message to the stream view that is none; requests, whose answers are streams, are few."""
    headers = [(b"Content-Type", JSON if random.random() < 0.9 else random.choice(_TYPES))]
    headers.append(
        (b"Accept", random.choice(_ACCEPTS[:2]) if random.random() < 0.8 else random.choice(_ACCEPTS))
    )
    if random.random() < 0.95:
        headers.append(
            (
                b"Mcp-Session-Id",
                seat.token if random.random() < 0.9 else random.choice((b"", b"x", b"\xff", b"a b")),
            )
        )
    if random.random() < 0.4:
        headers.append((b"Mcp-Protocol-Version", random.choice(_REVISIONS)))
    method = b"POST" if random.random() < 0.97 else random.choice((b"PUT", b"PATCH", b"OPTIONS", b"HEAD"))
    return request(method, STREAM, headers, _LARGE if random.random() < 0.002 else json_text(random))


def _place(random: Random, target: Target, seat: Seat) -> bytes:
    """An endpoint that is none, a session that is nobody's, a method that is not for it."""
    token = random.choice(
        (seat.token, seat.token, b"x", seat.token[:-1], seat.token + b"A", b"%2e%2e", b"A" * 43, b"%00")
    )
    part = random.choice(
        (b"", b"/messages", b"/events", b"/upgrade", b"/ack", b"/nothing", b"/events/events", b"/")
    )
    method = random.choice((b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"PATCH"))
    if method == b"GET" and part == b"/events" and token == seat.token:
        method = b"PUT"
    headers = (
        []
        if random.random() < 0.7
        else [(random.choice((b"Origin", b"Authorization", b"Cookie")), b"https://evil.example")]
    )
    host = (
        b"127.0.0.1"
        if random.random() < 0.8
        else random.choice((b"evil.example", b"", b"127.0.0.1:1", b"[::1]", b"\xff", None))
    )
    return request(
        method, SESSION + b"/" + token + part, headers, b"{}" if method == b"POST" else None, host=host
    )


def _opening(random: Random, target: Target) -> Volley:
    """What opens a session, with something wrong about it; now and then it does open one."""
    body = json_text(random).replace(b'"ping"', b'"initialize"')
    if random.random() < 0.1:
        data = request(random.choice((b"POST", b"GET", b"PUT")), SESSION, _HEADERS, body)
    else:
        headers = [*_HEADERS, (b"Accept", random.choice(_ACCEPTS))]
        data = request(b"POST", STREAM, headers, body)
    return Volley([data], plain=True)


def _ending(random: Random, target: Target) -> Volley:
    """The end of a session, twice, and what its endpoints say then."""
    seat = target.seat(random, streams=random.random() < 0.3)
    ending = target.ending(seat)
    if random.random() < 0.9:
        ending = ending.replace(seat.token, seat.token[::-1])  # nobody's
    return Volley([ending + ending + _ack(random, target, seat)], 3, seat=seat, plain=True)


_KEYS: Final = (
    None, b"", b"x", b"AAAA", b"dGhlIHNhbXBsZSBub25jZQ", b"dGhlIHNhbXBsZSBub25jZQ==, x", b"\xff", b"A" * 9000,
)  # fmt: skip
_WORDS: Final = (None, b"", b"close", b"keep-alive, Upgrade", b"upgrade, close", b"Upgrade\tx", b"\xff")
_UPGRADES: Final = (None, b"", b"h2c", b"websocket, h2c", b"WebSocket", b"websocket/13", b"\xff")
_EXTENSIONS: Final = (
    *(
        b"permessage-deflate",
        b"permessage-deflate; server_max_window_bits=99",
        b"permessage-deflate; x=",
        b"x",
        b",",
        b"\xff",
    ),
    *(
        b"permessage-deflate; client_max_window_bits=8; client_max_window_bits=8",
        b'x; y="',
        b"permessage-deflate," * 40,
    ),
)


def handshake(random: Random, target: Target) -> Volley:
    """A handshake with one thing wrong about it, or several, and bytes behind it."""
    seat = target.seat(random, streams=False)
    wrong: dict[str, bytes | None] = {}
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        name, values = random.choice(
            (
                ("Sec_WebSocket_Key", _KEYS),
                ("Sec_WebSocket_Version", (None, b"", b"12", b"14", b"13, 8", b"x", b"\xff")),
                (
                    "Sec_WebSocket_Protocol",
                    (None, b"", b"mcp.v2", b"mcp.v1, x", b"x, mcp.v1", b"\xff", b",,", b"mcp.v1 "),
                ),
                ("Connection", _WORDS),
                ("Upgrade", _UPGRADES),
                ("Sec_WebSocket_Extensions", _EXTENSIONS),
                ("Host", (b"evil.example", b"x")),
                ("Origin", (b"https://evil.example", b"null", b"\xff", b"http://[")),
                ("Content_Length", (b"5", b"0", b"x")),
                ("Transfer_Encoding", (b"chunked",)),
            )
        )
        wrong[name] = random.choice(values)
    headers: list[tuple[bytes, bytes]] = []
    path = seat.path + b"/events"
    query: list[bytes] = []
    if random.random() < 0.7:
        headers.append((b"Last-Event-ID", target.cursor(random, seat)))
    else:
        query.append(b"cursor=" + quote_from_bytes(target.cursor(random, seat)).encode())
    if random.random() < 0.3:
        query.append(b"ticket=" + random.choice((b"", b"x", b"%ff", b"y" * 3000, b"\xc3\xbc")))
    if random.random() < 0.2:
        query.append(b"client=" + random.choice((b"", b"%00", b"x" * 200, b"%ff")))
    if random.random() < 0.1:
        path = random.choice(
            (STREAM, SESSION, seat.path + b"/messages", b"/healthz", b"/x", seat.path + b"/events/")
        )
    data = upgrade(path + (b"?" + b"&".join(query) if query else b""), headers, **wrong)
    if random.random() < 0.1:
        data = mutated(random, data)
    behind = random.choice(
        (
            b"",
            b"",
            b"\x81\x80\x00\x00\x00\x00",
            b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"\xff" * 9,
        )
    )
    return Volley([data + behind], seat=seat)


ENDPOINT_FAMILIES: Final = (
    Family("messages", 70, _many(_message, streams=False)),
    Family("messages in blocks", 40, _many(_several, streams=False)),
    Family("acks", 40, _many(_ack, streams=False)),
    Family("offers to upgrade", 40, _many(_offer, streams=False)),
    Family("cursors", 60, _cursors),
    Family("stream view", 90, _many(_stream, streams=True)),
    Family("places and methods", 60, _many(_place, streams=False)),
    Family("openings", 2, _opening),
    Family("endings", 8, _ending),
    Family("handshakes", 60, handshake),
)
