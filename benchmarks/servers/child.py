"""An MCP server over stdio that costs next to nothing: lines made before they are asked for.

It is what a row's `stdio backend` means. Of its tools, `burst` emits `count` notifications of 300 bytes as
fast as the pipe takes them, `batch` to a write, with `pause` seconds between two writes; `tick` emits one
every `every` seconds, with the monotonic clock in it; `echo` answers.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time

SIZE = 300
CHUNK = 1 << 18


def line(n: int, at: int = 0) -> bytes:
    """One notification, `SIZE` bytes long without its line end."""
    head = f'{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":{{"n":{n},'
    head += f'"at":{at},"pad":"'
    return f'{head}{"." * (SIZE - len(head) - 4)}"}}}}}}\n'.encode()


@functools.cache
def lines(count: int, batch: int) -> list[bytes]:
    """The notifications 0 to `count - 1`, as they are written."""
    made = [line(n) for n in range(count)]
    return [b"".join(made[at : at + batch]) for at in range(0, count, batch)]


def write(data: bytes) -> None:
    """All of it to the pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view[:CHUNK]) :]


def burst(count: int, batch: int = 1000, pause: float = 0.0) -> str:
    """Emit as fast as the pipe takes it, or with pauses."""
    for part in lines(count, batch):
        write(part)
        if pause:
            time.sleep(pause)
    return f"emitted {count}"


def tick(count: int, every: float) -> str:
    """Emit at a steady rate."""
    due = time.monotonic()
    for n in range(count):
        due += every
        time.sleep(max(0.0, due - time.monotonic()))
        write(line(n, time.monotonic_ns()))
    return f"emitted {count}"


def echo(text: str = "") -> str:
    """Answer."""
    return f"emitted {text}"


TOOLS = {"burst": burst, "tick": tick, "echo": echo}


def answer(message: dict) -> dict | None:
    """The result of one request; `None` for what wants none."""
    params = message.get("params") or {}
    match message.get("method"):
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}, "logging": {}},
                "serverInfo": {"name": "child", "version": "1"},
            }
        case "tools/call":
            text = TOOLS[params["name"]](**params.get("arguments", {}))
            return {"content": [{"type": "text", "text": text}]}
        case "tools/list":
            return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        case _:
            return {} if "id" in message else None


def main() -> None:
    """Serve until stdin ends."""
    for text in sys.stdin.buffer:
        message = json.loads(text)
        result = answer(message)
        if result is not None and "id" in message:
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    main()
