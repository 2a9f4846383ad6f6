"""The whole application in this process, without sockets: one session, asked one thing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from gapless.backends.base import Backend, Sink
from gapless.log.memory import MemoryLog
from gapless.protocol.jsonrpc import Envelope, Kind
from gapless.protocol.settings import Limits
from gapless.server.app import Settings, build

__all__ = ["LIMITS", "Served", "run", "serve"]

LIMITS: Final = Limits(max_message_bytes=512, retain_events=64, probe_timeout=0.05)

Message = dict[str, Any]

_loop = asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run one input's work; whatever escapes it escapes the target."""
    _loop.run_until_complete(work)


class _Answering(Backend):
    """An MCP server that answers each request at once."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    async def send(self, data: bytes, envelope: Envelope) -> None:
        if envelope.kind is Kind.REQUEST:
            answer = json.dumps({"jsonrpc": "2.0", "id": envelope.id, "result": {}}).encode()
            full = self._sink.emit(answer, Envelope(Kind.RESPONSE, id=envelope.id), None)
            if full is not None:
                await full

    async def close(self) -> None:
        pass


class _Backends:
    spawns = False

    async def start(self) -> None:
        pass

    async def open(self, sink: Sink) -> Backend:
        return _Answering(sink)

    async def close(self) -> None:
        pass


class _Complaints(logging.Handler):
    """What the server caught and logged as an error is as bad as what it let out."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


class Served:
    """An application with one session in it."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self.token = ""
        self.start = ""

    async def ask(
        self, method: str, part: str, headers: dict[str, bytes], body: Iterable[bytes] = ()
    ) -> tuple[int, bytes]:
        """One request; its status and body. The body is given in the pieces that it arrives in."""
        pieces = list(body) or [b""]
        inbox: list[Message] = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]
        inbox[-1]["more_body"] = False
        out: list[Message] = []

        async def receive() -> Message:
            return inbox.pop(0) if inbox else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            out.append(message)

        await self._app(self._scope("http", part, headers) | {"method": method}, receive, send)
        return out[0]["status"], b"".join(m.get("body", b"") for m in out[1:])

    async def speak(self, frames: Iterable[str | bytes]) -> tuple[list[str], int | None]:
        """A socket from the start, and these frames on it: what was written, and the close code."""
        inbox: list[Message] = [{"type": "websocket.connect"}]
        inbox += [{"type": "websocket.receive", "text" if isinstance(f, str) else "bytes": f} for f in frames]
        out: list[Message] = []

        async def receive() -> Message:
            await asyncio.sleep(0)
            return inbox.pop(0) if inbox else {"type": "websocket.disconnect", "code": 1005}

        async def send(message: Message) -> None:
            out.append(message)

        scope = self._scope("websocket", "events", {"last-event-id": self.start.encode(), "mcp-client": b"p"})
        await self._app(scope | {"subprotocols": ["mcp.v1"]}, receive, send)
        assert out[0]["type"] == "websocket.accept", out[0]
        code = out[-1]["code"] if out[-1]["type"] == "websocket.close" else None
        return [m["text"] for m in out if m["type"] == "websocket.send"], code

    def _scope(self, kind: str, part: str, headers: dict[str, bytes]) -> Message:
        path = f"/mcp/session/{self.token}/{part}".rstrip("/") if self.token else "/mcp/session"
        return {
            "type": kind,
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), *((k.encode(), v) for k, v in headers.items())],
        }


@asynccontextmanager
async def serve():
    """A server, with a session in which one request was made and answered; it may log no errors."""
    app = build(MemoryLog(), _Backends(), Settings(limits=LIMITS))
    served, complaints, logger = Served(app), _Complaints(), logging.getLogger("gapless")
    logger.addHandler(complaints)
    await app.start()
    try:
        status, body = await served.ask("POST", "", {})
        assert status == 201, body
        opened = json.loads(body)
        served.token, served.start = opened["session"], opened["cursor"]
        yield served
    finally:
        await app.close()
        logger.removeHandler(complaints)
    assert not complaints.seen, [record.getMessage() for record in complaints.seen]
