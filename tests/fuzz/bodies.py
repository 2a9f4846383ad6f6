"""Bodies of requests, as the session view takes them: messages, upgrades, acks (§5, L6)."""

from __future__ import annotations

import json

from gapless.protocol.block import encode_block
from gapless.protocol.refusal import read_refusal
from tests.fuzz.serving import Served, run, serve

__all__ = ["SEEDS", "target"]

_CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t","_meta":{"progressToken":1}}}'
_NOTE = '{"jsonrpc":"2.0","method":"notifications/é\u2028"}'.encode()

SEEDS = (
    b"m1\n" + _CALL,
    b"m1\n" + _CALL.replace(b",", b",\r\n"),
    b"m2\n" + _CALL,
    b"m01\n" + _CALL,
    b"m1\n",
    b"m1\n[" + _CALL + b"]",
    b'm1\n{"jsonrpc":"2.0","id":"\\ud800","method":"m","params":NaN}',
    b"m1\n" + b'{"jsonrpc":"2.0","id":9,"method":"m","params":' + b"[" * 300 + b"]" * 300 + b"}",
    b"m1\n" + _CALL.replace(b'"t"', b'"' + b"x" * 600 + b'"'),
    b"s" + encode_block("message", _CALL, "1") + encode_block("message", _NOTE, "2"),
    b"s" + encode_block("message", _CALL, "1") + encode_block("message", _NOTE, "3"),
    b"s" + encode_block("message", b"", "1") + encode_block("received", b"{}") + b"data: tail",
    b"s" + encode_block("message", b"x" * 2000, "1"),
    b"sid: \xff\ndata: {}\n\n",
    b'u{"cursor":"$C","protocol":"mcp.v1","negotiation":"n1"}',
    b'u{"cursor":"$C","protocol":"mcp.v2","negotiation":"n1"}',
    b'u{"cursor":"1.0.a193f6b6c59d5344","protocol":"mcp.v1","negotiation":""}',
    b'a{"cursor":"$C"}',
    b'a{"cursor":"0","cursor":{}}',
    b'a["cursor"]',
    b'a{"cursor":"\xff"}',
    b'a{"cursor":' + b"[" * 3000,
)

_JSON = {"content-type": b"application/json", "mcp-client": b"p"}
_STREAM = {"content-type": b"text/event-stream", "mcp-client": b"p"}


def target(data: bytes) -> None:
    """A letter says which endpoint; for one message, a line with its number follows. `$C` is the start."""
    run(_ask(data))


async def _ask(data: bytes) -> None:
    async with serve() as served:
        body = data[1:].replace(b"$C", served.start.encode())
        match data[:1]:
            case b"s":
                pieces = [body[at : at + 40] for at in range(0, len(body), 40)]
                status, answer = await served.ask("POST", "messages", _STREAM, pieces)
                accepted = 202
            case b"u":
                status, answer = await served.ask("POST", "upgrade", _JSON, [body])
                accepted = 200
            case b"a":
                status, answer = await served.ask("POST", "ack", _JSON, [body])
                accepted = 200
            case _:
                number, _, body = body.partition(b"\n")
                # What an HTTP server hands over as a header's value has no control characters.
                number = bytes(byte for byte in number if byte >= 0x20 and byte != 0x7F)
                headers = _JSON | {"mcp-message-number": number}
                status, answer = await served.ask("POST", "messages", headers, [body])
                accepted = 202
        if status == accepted:
            assert isinstance(json.loads(answer), dict)
        else:
            refusal = read_refusal(answer)
            assert refusal is not None
            assert refusal.row.status == status
        await _still_there(served)


async def _still_there(served: Served) -> None:
    """Whatever it was, the session goes on."""
    status, _ = await served.ask("POST", "ack", _JSON, [b'{"cursor":"%s"}' % served.start.encode()])
    assert status == 200
