"""uvicorn between a socket and an MCP server's pipe, and nothing else: about the least that anything costs.

Each message is written to one process as it came; of a request, the next line that the process writes is the
answer, as a single event. An event stream opens and is silent; a socket is told one event, and is silent.
No session, no log, no check.

    python floor.py PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn

from benchmarks.harness import CHILD

_STREAM = [
    (b"cache-control", b"no-store, no-transform"),
    (b"content-type", b"text/event-stream"),
    (b"mcp-session-id", b"floor"),
]
_EVENT = "id: 7.0.0123456789abcdef\ndata: {}\n\n"
_ECHO = [(b"x-mcp-resume-cursor", b"7")]


class Floor:
    """The ASGI application."""

    _child: asyncio.subprocess.Process | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One message, a stream or a socket."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept", "subprotocol": "mcp.v1", "headers": _ECHO})
            await send({"type": "websocket.send", "text": f"event: resume-cursor\ndata: {{}}\n\n{_EVENT}"})
            while (await receive())["type"] != "websocket.disconnect":
                pass
            return
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
            opening = b"id: 7.0.0123456789abcdef\nretry: 100\ndata:\n\n"
            await send({"type": "http.response.body", "body": opening, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        pipe = asyncio.subprocess.PIPE
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(CHILD)), stdin=pipe, stdout=pipe
            )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        body = (await receive())["body"]
        child.stdin.write(body + b"\n")
        if b'"id":' not in body:
            await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        line = await child.stdout.readline()
        block = b"id: 1.1.0123456789abcdef\ndata: " + line + b"\n"
        await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


if __name__ == "__main__":
    quiet = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    quiet["ws"] = "websockets-sansio"  # as Gapless has it
    uvicorn.run(Floor(), host="127.0.0.1", port=int(sys.argv[1]), **quiet)
