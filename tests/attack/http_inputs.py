"""Bad inputs to HTTP itself: request lines, headers, framing, and what comes before or after them."""

from __future__ import annotations

from random import Random
from typing import Final

from tests.attack.shapes import EVENTS, JSON, cut, json_text, mutated, request, upgrade
from tests.attack.target import SESSION, STREAM, Target
from tests.attack.volley import Family, Volley

__all__ = ["HTTP_FAMILIES"]

_GOOD: Final = request(b"GET", b"/healthz")
_TINY: Final = b'{"jsonrpc":"2.0","method":"notifications/x"}'
_METHODS: Final = (
    *(
        b"GET",
        b"POST",
        b"PUT",
        b"DELETE",
        b"HEAD",
        b"OPTIONS",
        b"PATCH",
        b"TRACE",
        b"CONNECT",
        b"PROPFIND",
        b"QUERY",
    ),
    *(
        b"get",
        b"Get",
        b"G\x00T",
        b"GE T",
        b"",
        b"\xff",
        b"GET\t",
        b"M-SEARCH",
        b"PRI",
        b"A" * 40,
        b"POST/",
        b"G\xc3\x9cT",
    ),
)
_PARTS: Final = (
    b"", b"/messages", b"/events", b"/upgrade", b"/ack", b"/", b"/nothing", b"/messages/", b"/events/x",
)  # fmt: skip
_TARGETS: Final = (
    b"/", b"*", b"", b"//", b"/mcp", b"/mcp/", b"//mcp", b"/mcp//session", b"/MCP", b"/mcp/session",
    b"/mcp/../mcp", b"/mcp/session/%2e%2e/events", b"/mcp/session/..;/events", b"/mcp/session/%00/events",
    b"/mcp/session/%/events", b"/mcp/session/%zz", b"/mcp/session/%ff%fe/ack", b"/mcp/session/%c3%28/events",
    b"/mcp/session/%F0%9F%98%80/ack", b"/mcp%2fsession", b"/mcp/session%2fx%2fevents",
    b"/mcp/session/a%0d%0aX: 1/events", b"/mcp?x=%ff", b"/mcp#frag", b"http://127.0.0.1/mcp",
    b"http://evil.example/mcp", b"https://127.0.0.1:1/mcp/session", b"127.0.0.1:80", b"http:///mcp",
    b"ftp://x/mcp", b"mailto:x", b"javascript:1", b"http://[::1/mcp", b"http://a:b@c:d/mcp", b"?x", b"#",
    b"/mcp/session/\xc3\xbc", b"/mcp/session/\xff/events", b"/m cp", b"/mcp\t", b"\\mcp",
    b"/mcp/session/x?client=%ff", b"/metrics", b"/readyz", b"/metrics/..", b"/healthz/",
    b"/.well-known/oauth-protected-resource", b"/favicon.ico", b"/mcp/session/x/events?ticket=1&cursor=0",
    b"/mcp/session/x/events?cursor=%00", b"/mcp?" + b"&" * 900, b"/%",
)  # fmt: skip
_VERSIONS: Final = (
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/3", b"HTTP/1.2", b"HTTP/1.1.1", b"HTTP/11",
    b"http/1.1", b"HTTP/1.", b"HTTP/", b"HTTP", b"", b"HTTPS/1.1", b"ICE/1.0", b"RTSP/1.0", b"HTTP/1.1 x",
    b"HTTP/-1.1", b"HTTP/1.1\t", b"HTTP/99999999999999999999.1",
)  # fmt: skip
_PREFACES: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00", b"GET /mcp\r\n",
    b"GET /mcp\r\n\r\n", b"\r\n" * 40, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 64,
    b"GET / HTTP/1.1\n\n", b"GET / HTTP/1.1\nHost: 127.0.0.1\n\n", b"GET / HTTP/1.1\rHost: 127.0.0.1\r\r",
    b"SSH-2.0-x\r\n", b"\x81\x85\x00\x00\x00\x00hello", b"HTTP/1.1 200 OK\r\n\r\n", b"{}\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b" GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1 \r\nHost: 127.0.0.1\r\n\r\n", b"\r\n \r\nGET / HTTP/1.1\r\n\r\n",
    b"\xef\xbb\xbfGET / HTTP/1.1\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n", b"\n\n\nGET / HTTP/1.1\r\n\r\n",
    b"data: {}\n\n", b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\nGET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n",
    b"\r\r\n\n",
)  # fmt: skip


def _path(random: Random, target: Target) -> bytes:
    if random.random() < 0.5:
        return random.choice(_TARGETS)
    return target.seat(random, streams=False).path + random.choice(_PARTS)


def _lines(random: Random, target: Target) -> Volley:
    """One request line that is wrong, after up to two that are good."""
    if random.random() < 0.2:
        data = random.choice(_PREFACES)
    else:
        method, where, version = random.choice(_METHODS), _path(random, target), b"HTTP/1.1"
        if random.random() < 0.5:
            version = random.choice(_VERSIONS)
        if random.random() < 0.01:
            where += random.choice((b"?x=" + b"y" * 9000, b"/" * 40000, b"%61" * 3000))
        data = request(method, where, version=version)
        if random.random() < 0.1:
            data = data.replace(b" ", random.choice((b"  ", b"\t", b"", b"\x0b", b"\xc2\xa0")), 1)
    return Volley(cut(random, _before(random) + data) if random.random() < 0.2 else [_before(random) + data])


def _before(random: Random) -> bytes:
    return _GOOD * random.choice((0, 0, 0, 1, 2))


_FIELDS: Final = (
    b"Host", b"Content-Length", b"Transfer-Encoding", b"Last-Event-ID", b"Mcp-Session-Id", b"Authorization",
    b"Origin", b"Content-Type", b"Accept", b"Connection", b"Upgrade", b"Expect", b"Mcp-Message-Number",
    b"Mcp-Client", b"Cookie", b"Mcp-Protocol-Version", b"Sec-WebSocket-Key", b"Forwarded", b"X-Forwarded-For",
    b"X-Forwarded-Proto", b"TE", b"Access-Control-Request-Method", b"Range", b"If-None-Match",
    b"Content-Encoding", b"Trailer", b"Keep-Alive",
)  # fmt: skip
_CONTENTS: Final = (
    b"", b" ", b"x", b"0", b"1", b"-1", b"+1", b"1,1", b"0x1", b"1e3", b"99999999999999999999", b"chunked",
    b"gzip, chunked", b"identity", b"127.0.0.1", b"127.0.0.1:99999", b"evil.example", b"127.0.0.1, evil",
    b"[::1", b"localhost:x", b"*", b"Bearer", b"Bearer x", b"Bearer " + b"a" * 300, b"Basic eDp5",
    b"bearer\tx", b"null", b"https://evil.example", b"file://", b"application/json", b"text/event-stream",
    b"text/event-stream;q=0", b"application/json;charset=utf-16", b"a/b;", b"/", b"close",
    b"keep-alive, upgrade", b"websocket", b"h2c", b"100-continue", b"100-CONTINUE, x", b"2026-07-28",
    b"1999-01-01", b"\xff", b"\xc3\xbc", b"\xed\xa0\x80", b"a\x00b", b"a\rb", b"a\nb", b"a\r\n b",
    b"a\r\n\tb", b"a\x7fb", b"a\x0bb", b"a\x85b", b"9223372036854775807", b"9223372036854775808",
    b"0.0.0000000000000000", b"47.0.a193f6b6c59d5344", b"=?utf-8?q?x?=", b"a" * 8000, b"bytes=0-1",
    b"for=\"_x\"", b"1.2.3.4, 5.6.7.8", b"GET", b"deflate", b"trailers",
)  # fmt: skip
_RAW: Final = (
    b"NoColon", b": empty", b" Leading: x", b"Space : x", b"Tab\t: x", b"\xff: x", b"N\xc3\xbcr: x",
    b"A\x00B: x", b"A(B): x", b"\x0b: x", b"Content-Length\x00: 3", b"Transfer-Encoding : chunked",
    b"Transfer_Encoding: chunked", b"Host:127.0.0.1", b"X: a\r\n b", b"X:\r\n\ty", b"X: a\rY: b",
    b"X: a\nY: b", b"X: a\n b", b"X", b"", b"\tX: 1", b"Content-Length: 1\r\n 0", b"X: \x00",
    b"GET / HTTP/1.1",
)  # fmt: skip


def _headers(random: Random, target: Target) -> Volley:
    """One request with headers that are too many, too large, or none at all."""
    lines: list[bytes] = []
    if random.random() < 0.9:
        lines.append(b"Host: 127.0.0.1")
    post = random.random() < 0.4
    seat = target.seat(random, streams=random.random() < 0.5)
    if seat.streams or random.random() < 0.2:
        lines.append(b"Mcp-Session-Id: " + seat.token)
    if post:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(_TINY)]
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.4:
            lines.append(random.choice(_RAW))
            continue
        name = random.choice(_FIELDS)
        lines += [name + b": " + random.choice(_CONTENTS) for _ in range(random.choice((1, 1, 2, 3)))]
    match random.randrange(300):
        case 0:
            lines.append(b"X: " + b"y" * 40000)
        case 1:
            lines += [b"X-%d: %d" % (n, n) for n in range(3000)]
        case 2:
            lines.append(b"N" * 70000)
        case _:
            pass
    random.shuffle(lines)
    where = STREAM if seat.streams else seat.path + random.choice(_PARTS)
    line = b"%b %b HTTP/1.1" % (
        b"POST" if post else random.choice((b"GET", b"DELETE", b"OPTIONS", b"HEAD")),
        where,
    )
    if line.startswith(b"DELETE") and random.random() < 0.95:
        line = line.replace(b"DELETE", b"PUT")  # else too many sessions end
    data = b"\r\n".join([line, *lines]) + b"\r\n\r\n" + (_TINY if post else b"")
    return Volley([_before(random) + data], seat=seat)


_CODINGS: Final = (
    *(
        b"chunked",
        b"Chunked",
        b"chunked ",
        b" chunked",
        b"\tchunked",
        b"xchunked",
        b"chunked, identity",
        b"identity, chunked",
    ),
    *(
        b"chunked,chunked",
        b"chunked;q=1",
        b"\x0bchunked",
        b"chunked\x00",
        b'"chunked"',
        b"gzip",
        b"",
        b"chunked\r\n , gzip",
        b"CHUNKED",
    ),
)
_LENGTHS: Final = (
    b"0", b"00", b"5", b"+5", b"-5", b"5 ", b"5,5", b"5, 6", b"0x5", b"5.0", b"\xd9\xa5", b"", b"5\x00",
    b"4 4", b"9" * 25,
)  # fmt: skip
_CHUNKS: Final = (
    b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n", b"5 ;x\r\nhello\r\n0\r\n\r\n",
    b'5;x="\r\n"\r\nhello\r\n0\r\n\r\n', b"05\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"5\nhello\n0\n\n", b"5\rhello\r0\r\r",
    b"6\r\nhello\r\n0\r\n\r\n", b"4\r\nhello\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\nx", b"5\r\nhello0\r\n\r\n",
    b"\r\n5\r\nhello\r\n", b"5\r\nhello\r\n", b"5\r\nhe", b"5", b"", b"g\r\n",
    b"5\r\nhello\r\n0\r\nX: y\r\n\r\n", b"5\r\nhello\r\n0\r\nX : y\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nContent-Length: 9\r\n\r\n", b"5\r\nhello\r\n0\r\nHost: evil\r\n\r\n",
    b"5\r\nhello\r\n0\r\n bad\r\n\r\n", b"5\r\nhello\r\n00000\r\n\r\n",
    b"5;" + b"x" * 9000 + b"\r\nhello\r\n0\r\n\r\n", b"5;\x00\r\nhello\r\n0\r\n\r\n",
    b"5;x\n\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0;x=\r\n\r\n", b"5\r\nhello\r\n0\r\n",
    b"1\r\nh\r\n" * 40 + b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n" + b"T: x\r\n" * 30 + b"\r\n",
    b"5\r\nhello\r\n0\r\n" + b"T" * 9000 + b": x\r\n\r\n",
)  # fmt: skip


def _framing(random: Random, target: Target) -> Volley:
    """A body whose end two readers might see in two places, and a request hidden in or after it."""
    seat = target.seat(random, streams=random.random() < 0.5)
    where = random.choice((STREAM, SESSION, seat.path + b"/messages", seat.path + b"/ack", b"/healthz"))
    lines = [b"Host: 127.0.0.1", b"Content-Type: application/json", b"Mcp-Session-Id: " + seat.token]
    shape = random.randrange(6)
    if shape in (0, 1, 3):
        lines += [b"Transfer-Encoding: " + random.choice(_CODINGS)] * random.choice((1, 1, 1, 2))
    if shape in (0, 2, 4):
        lines += [b"Content-Length: " + random.choice(_LENGTHS) for _ in range(random.choice((1, 1, 2)))]
    if shape == 5:
        lines.append(random.choice((b"Transfer-Encoding: chunked", b"Content-Length: 5")))
    body = random.choice(_CHUNKS) if shape != 2 else random.choice((b"hello", b"", b"hell", b"helloX"))
    if shape == 1 and random.random() < 0.2:
        body = mutated(random, body)
    random.shuffle(lines)
    method = random.choice((b"POST", b"POST", b"GET", b"DELETE" if where == b"/healthz" else b"PUT"))
    hidden = random.choice((b"", _GOOD, _GOOD * 3, b"G", upgrade(seat.path + b"/events"), b"\x00" * 20))
    return Volley([b"\r\n".join([b"%b %b HTTP/1.1" % (method, where), *lines]) + b"\r\n\r\n" + body + hidden])


def _bytes(random: Random, target: Target) -> Volley:
    """Good requests with some bytes changed, good ones before and after them."""
    seat = target.seat(random, streams=False)
    headers = [
        (b"Content-Type", JSON),
        (b"Mcp-Client", b"attack"),
        (b"Mcp-Message-Number", b"%d" % seat.number),
    ]
    one = random.choice(
        (
            request(b"POST", seat.path + b"/messages", headers, json_text(random)),
            request(b"GET", seat.path + b"/upgrade", [(b"Last-Event-ID", seat.cursor())]),
            request(b"POST", seat.path + b"/ack", headers[:1], b'{"cursor":"%b"}' % seat.cursor()),
            request(b"POST", STREAM, [*headers[:1], (b"Accept", b"*/*"), (b"Mcp-Session-Id", b"x")], _TINY),
            upgrade(seat.path + b"/events", [(b"Last-Event-ID", seat.cursor())]),
        )
    )
    data = _before(random) + mutated(random, one) + _before(random)
    return Volley(cut(random, data) if random.random() < 0.3 else [data], seat=seat)


def _slow(random: Random, target: Target) -> Volley:
    """The beginning of a request; the server is left to wait for the rest."""
    seat = target.seat(random, streams=False)
    headers = [
        (b"Content-Type", JSON),
        (b"Mcp-Client", b"attack"),
        (b"Mcp-Message-Number", b"%d" % seat.number),
    ]
    whole = random.choice(
        (
            request(b"POST", seat.path + random.choice(_PARTS), headers, json_text(random) + b" " * 50),
            request(b"POST", STREAM, headers, json_text(random) + b" " * 50),
            request(b"POST", SESSION, [(b"Transfer-Encoding", b"chunked")]) + b"5\r\nhello\r\n5\r\nhel",
            upgrade(seat.path + b"/events", [(b"Last-Event-ID", seat.cursor())]),
            _GOOD,
            b"\r\n\r\n",
        )
    )
    return Volley([_before(random) + whole[: random.randint(0, len(whole) - 1)]], patient=True)


def _after_streams(random: Random, target: Target) -> Volley:
    """A request whose answer is an event stream that goes on, and garbage or requests behind it."""
    seat = target.seat(random, streams=random.random() < 0.3)
    headers = [(b"Accept", EVENTS)]
    if seat.streams:
        first = request(b"GET", STREAM, [*headers, (b"Mcp-Session-Id", seat.token)])
    else:
        first = request(b"GET", seat.path + b"/events", [*headers, (b"Last-Event-ID", seat.cursor())])
    garbage = random.choice(
        (*_PREFACES, _GOOD, _GOOD * 5, b"x", mutated(random, _GOOD), b"\r\n", random.randbytes(300))
    )
    return Volley([first, garbage] if random.random() < 0.5 else [first + garbage], seat=seat)


HTTP_FAMILIES: Final = (
    Family("request lines", 110, _lines),
    Family("headers", 150, _headers),
    Family("framing", 150, _framing),
    Family("bytes", 130, _bytes),
    Family("cut short", 8, _slow),
    Family("after a running stream", 12, _after_streams),
)
