"""What bad inputs are made of: requests, handshakes, JSON and blocks that are wrong in every way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Final

__all__ = [
    "BODIES", "EVENTS", "JSON", "VALUES", "blocks", "cut", "json_text", "mutated", "request", "upgrade",
]  # fmt: skip

JSON: Final = b"application/json"
EVENTS: Final = b"text/event-stream"

Headers = Iterable[tuple[bytes, bytes]]


def request(
    method: bytes,
    path: bytes,
    headers: Headers = (),
    body: bytes | None = None,
    *,
    host: bytes | None = b"127.0.0.1",
    version: bytes = b"HTTP/1.1",
) -> bytes:
    """One request; with a body it says how long that is."""
    lines = [b"%b %b %b" % (method, path, version)]
    if host is not None:
        lines.append(b"Host: " + host)
    lines += [b"%b: %b" % field for field in headers]
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def upgrade(path: bytes, headers: Headers = (), **wrong: bytes | None) -> bytes:
    """A handshake; `wrong` has other values for its headers by name, `None` to leave one out."""
    fields = {
        "Connection": b"Upgrade",
        "Upgrade": b"websocket",
        "Sec-WebSocket-Version": b"13",
        "Sec-WebSocket-Key": b"dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": b"mcp.v1",
        **{name.replace("_", "-"): value for name, value in wrong.items()},
    }
    given = [(name.encode(), value) for name, value in fields.items() if value is not None]
    return request(b"GET", path, [*given, *headers])


# JSON that is wrong, or right and of no use ---------------------------------------------------------------

VALUES: Final[Sequence[bytes]] = [
    b"null", b"true", b"false", b"0", b"-0", b"-1", b"1.5", b"1e999", b"-1e999", b"NaN", b"Infinity",
    b"1e-400", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" * 400, b"0x10",
    b"01", b".5", b'""', b'"x"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\\x41"', b'"\n"',
    b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"\xe2\x80\xa8"',
    b'"\xf0\x9f\x98\x80"', b'"' + b"a" * 3000, b"[]", b"[1]", b"[[]]", b"{}", b'{"a":1}', b'{"":null}',
    b"[" * 200, b"[" * 2000 + b"]" * 2000, b"{" * 50, b'{"a":' * 600 + b"1" + b"}" * 600, b"'x'",
    b"undefined", b"/**/1", b"", b" ", b"\x00", b"\xef\xbb\xbf1", b"1 2",
]  # fmt: skip

_WHOLE: Final[Sequence[bytes]] = [
    b"", b" ", b"\r\n", b"null", b"[]", b"[[]]", b"{}", b"{", b"}", b'{"jsonrpc":', b'"',
    b"\xff\xfe{\x00}\x00", b"\x00" * 9,
    b'[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":2,"method":"ping"}]',
    b'{"jsonrpc":"2.0","id":1,"method":"ping"}{"jsonrpc":"2.0","id":2,"method":"ping"}',
    b'{"jsonrpc":"2.0","id":1,"method":"ping"}\x00', b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"method":"ping"}',
    b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping","method":"pong"}',
    b'{"jsonrpc":"2.0","jsonrpc":"1.0","id":1}', b'{"jsonrpc":"2.0","id":1,"result":{},"error":{}}',
    b'{"jsonrpc":"2.0","id":1}', b'{"jsonrpc":"2.0"}', b'{"jsonrpc":"2.0","result":1}',
    b'{"jsonrpc":"2.0","error":{"code":"x"}}', b'{"jsonrpc":"2.0","method":null}',
    b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[1,2]}', b'{"id":1,"method":"ping"}',
    b'{"jsonrpc":2.0,"id":1}', b'{"jsonrpc":"2.0","id":1,"method":"ping",}',
    b"{'jsonrpc':'2.0','id':1,'method':'ping'}", b'\n{"jsonrpc":"2.0","method":"notifications/x"}\n',
    b'{"jsonrpc":"2.0",\n"method":"notifications/x"}', b'{"jsonrpc":"2.0","\\u006dethod":"ping","id":7}',
    b'{"jsonrpc":"2.0","method":"notifications/x"}garbage', b"[" * 5000, b'{"a":' * 3000,
    b'{"jsonrpc":"2.0","id":1,"method":"ping","params":' + b"[" * 900 + b"]" * 900 + b"}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
]  # fmt: skip

_MEMBERS: Final = (b"jsonrpc", b"id", b"method", b"params", b"result", b"error")
_METHODS: Final = (
    "ping", "initialize", "tools/list", "tools/call", "logging/setLevel", "resources/subscribe", "x/y",
    "notifications/initialized", "notifications/cancelled", "notifications/progress", "subscriptions/listen",
    "server/discover", "completion/complete", "notifications/roots/list_changed", "", "\u2028", "rpc.x",
)  # fmt: skip
_GOOD: Final[dict[bytes, Sequence[bytes]]] = {
    b"jsonrpc": [b'"2.0"'],
    b"id": [b"%d" % n for n in range(40)] + [b'"%d"' % n for n in range(9)],
    b"method": [json.dumps(method).encode() for method in _METHODS],
    b"params": [
        b"{}", b'{"_meta":{"progressToken":1}}', b'{"name":"runs","arguments":{"run":"x"}}',
        b'{"name":"ladder","arguments":{"run":"a","rungs":3,"delay":0}}', b'{"level":"info"}',
        b'{"uri":"x:y"}', b'{"requestId":3}', b'{"name":7}',
        b'{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"x","version":"0"}}',
        b'{"progressToken":1,"progress":1}', b'{"name":"ladder","arguments":{"run":1,"rungs":"x"}}',
        b'{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}', b'{"_meta":[],"name":null}',
    ],
    b"result": [b"{}", b'{"action":"accept","content":{"rung":1}}'],
    b"error": [b'{"code":-32000,"message":"x"}', b'{"code":1}'],
}  # fmt: skip
_SHAPES: Final = (
    (0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 4), (0, 1, 5), (1, 2), (0, 1, 2, 4, 5), (0,), (0, 1),
)  # fmt: skip

BODIES: Final = _WHOLE


def json_text(random: Random) -> bytes:
    """A message that is wrong somewhere, or a good one that nobody waits for."""
    pick = random.random()
    if pick < 0.15:
        return random.choice(_WHOLE)
    names = [_MEMBERS[n] for n in random.choice(_SHAPES)]
    members = [(name, random.choice(_GOOD[name])) for name in names]
    if pick < 0.6:
        at = random.randrange(len(members))
        members[at] = (members[at][0], random.choice(VALUES))
    elif pick < 0.7:
        members.append((random.choice(names), random.choice(VALUES)))
    elif pick < 0.75:
        random.shuffle(members)
    text = b"{" + b",".join(b'"%b":%b' % member for member in members) + b"}"
    return mutated(random, text) if pick > 0.9 else text


def mutated(random: Random, data: bytes, pieces: Sequence[bytes] = ()) -> bytes:
    """Bytes with some of them gone, repeated, or replaced."""
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(data))
        match random.randrange(5):
            case 0:
                data = data[:at] + data[at + random.choice((1, 1, 2, 8, 60)) :]
            case 1:
                data = data[:at] + (random.choice(pieces or _PIECES)) + data[at:]
            case 2:
                data = data[:at] + random.randbytes(random.randint(1, 4)) + data[at + 1 :]
            case 3:
                data = data[:at] + data[max(0, at - random.randint(1, 30)) :]
            case _:
                data = (
                    data[:at] + bytes([random.choice(b'\r\n\0\t :;,"{}[]%\xff\x80\x7f\x0b')]) + data[at + 1 :]
                )
    return data


_PIECES: Final = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\0",
        b"\t",
        b" ",
        b":",
        b"\r\n ",
        b"\xff",
        b"\xc3\xbc",
        b"%00",
        b"%2f",
    ),
    *(
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b"0",
        b"1e999",
        b"null",
        b"\x0b\x0c",
        b"\x85",
        b"A" * 200,
        b"{",
        b"]",
    ),
)


# Blocks -----------------------------------------------------------------------------------------------------

_BLOCKS: Final[Sequence[bytes]] = [
    b"\n", b"\n\n", b":\n\n", b": a comment\n\n", b"\xef\xbb\xbf\n\n", b"data\n\n", b"data:\n\n",
    b"data: {}\n\n", b"id: 1\n\n", b"event: message\n\n", b"event: probe-ack\ndata: {}\n\n",
    b"event: probe-ack\n\n", b"event: cursor-ack\ndata: {}\n\n", b"event: cursor-ack\ndata: []\n\n",
    b"event: cursor-ack\n\n", b'event: cursor-ack\ndata: {"cursor":47}\n\n',
    b'event: cursor-ack\ndata: {"cursor":"47"}\n\n', b'event: cursor-ack\ndata: {"cursor":"0"}\n\n',
    b'event: cursor-ack\ndata: {"cursor":"99.0.0011223344556677"}\n\n',
    b'event: cursor-ack\ndata: {"cursor":null}\n\n', b'event: resume-cursor\ndata: {"cursor":1}\n\n',
    b'event: session-superseded\ndata: {"reason":"x"}\n\n', b"event: upgrade-accepted\ndata: {}\n\n",
    b"event: keepalive\ndata: {}\n\n", b"retry: 1\n\n", b"retry: x\n\n", b"id: 1\ndata: {\ndata: }\n\n",
    b"id: 99999999999999999999\ndata: {}\n\n", b"id: -1\ndata: {}\n\n", b"id: 1\nid: 2\ndata: {}\n\n",
    b"id: \x00\ndata: {}\n\n", b"id: 9223372036854775807\ndata: {}\n\n",
    b"id: 1.0.0011223344556677\ndata: {}\n\n", b"id: 1\r\ndata: {}\r\n\r\n", b"id: 1\rdata: {}\r\r",
    b"id:1\ndata:{}\n\n", b"unknown: field\n\n", b"event: \xc3\xbc\ndata: {}\n\n",
    b"data: " + b"x" * 3000 + b"\n\n", b"event: message\rdata: 1\n\n",
]  # fmt: skip


def blocks(random: Random, number: int, cursor: bytes) -> bytes:
    """Some blocks as a client might send them: broken, void, or of a number near the one that is due."""
    out = b""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        match random.randrange(6):
            case 0 | 1:
                out += random.choice(_BLOCKS)
            case 2:
                n = number + random.choice((0, 0, 1, -1, 2, 100, 2**62, 2**63 - 1 - number))
                text = json_text(random).replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
                out += b"id: %d\ndata: %b\n\n" % (n, text)
            case 3:
                out += b"id: %d\ndata: \n\n" % (number + random.choice((0, 0, 1, -1)))
            case 4:
                out += b'event: cursor-ack\ndata: {"cursor":"%b"}\n\n' % cursor
            case _:
                out += mutated(random, b'id: %d\nevent: message\ndata: {"jsonrpc":"2.0"}\n\n' % number)
    return out


def cut(random: Random, data: bytes) -> list[bytes]:
    """The same bytes in up to four pieces."""
    at = sorted(random.randint(0, len(data)) for _ in range(random.randint(1, 3)))
    edges = [0, *at, len(data)]
    return [data[low:high] for low, high in pairwise(edges) if high > low]
