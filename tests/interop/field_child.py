"""An MCP server over stdio that misbehaves on request; it needs no SDK, so that it starts at once.

`field_child.py MANNER [PORT]`. With a port it holds a connection to it for as long as it lives.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

NASTY = {
    "lone surrogate": b'"\\ud800"',
    "NaN": b"NaN",
    "invalid UTF-8": b'"\xff\xfe"',
    "deep nesting": b"[" * 100_000 + b"]" * 100_000,
}


def write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def say(**message: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode())


def sized(id: Any, size: int) -> bytes:
    """A result of so many bytes."""
    head, tail = b'{"jsonrpc":"2.0","id":%d,"result":{"pad":"' % id, b'"}}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


def call(id: Any, params: dict[str, Any]) -> None:
    """`tools/call`: what the tool's name says."""
    match params["name"]:
        case "ask":
            token = params["_meta"]["progressToken"]
            say(method="notifications/progress", params={"progressToken": token, "progress": 1})
            say(id=f"question {id}", method="elicitation/create", params={"message": f"for {id}"})
        case "die":
            os._exit(3)
        case "sized":
            write(sized(id, params["size"]))
        case name if name in NASTY:
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"value":%s}}' % (id, NASTY[name]))
        case _:
            say(id=id, result={"echo": params["name"]})


def answered(id: str, result: Any) -> None:
    """The client answered what a call had asked: the call goes on, and ends."""
    number = int(id.removeprefix("question "))
    say(method="notifications/progress", params={"progressToken": f"token {number}", "progress": 2})
    say(id=number, result={"answer": result})


def main(manner: str, port: str | None = None) -> None:
    if port is not None:
        line = socket.create_connection(("127.0.0.1", int(port)))
        line.sendall(b"child\n")
    if manner == "banner":
        write("Welcome to the server! \u2603".encode())
        write(b"")
        write(b"[1, 2")
    for read in sys.stdin.buffer:
        message = json.loads(read)
        id, params = message.get("id"), message.get("params", {})
        match message.get("method"):
            case "initialize":
                if manner == "dies in initialize":
                    os._exit(3)
                about = {"name": "child", "version": "1"}
                version = params["protocolVersion"]
                say(id=id, result={"protocolVersion": version, "capabilities": {}, "serverInfo": about})
            case "tools/call":
                call(id, params)
            case None:
                answered(id, message["result"])
            case _ if id is not None:
                say(id=id, result={})
            case _:
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])
