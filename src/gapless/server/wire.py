"""HTTP and ASGI details that both views share: bodies, responses, refusals, event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.auth.base import Principal
from gapless.errors import StorageError, TooLargeError
from gapless.protocol.delivery import Delivery
from gapless.protocol.jsonrpc import RequestId
from gapless.protocol.media import JSON, STREAM
from gapless.protocol.refusal import Reason, Refusal
from gapless.server.attached import Cuttable
from gapless.server.feed import feed
from gapless.server.live import Live

__all__ = [
    "ClientGoneError",
    "RefusedRequest",
    "accepts",
    "body_chunks",
    "not_allowed",
    "read_body",
    "refuse",
    "respond",
    "respond_json",
    "serve_events",
]

_LINGER: Final = 0.2
"""Seconds that a refused handshake waits for its peer to go."""

_RATE: Final = 1024.0
"""Bytes of a body that earn its sender another second."""

_PRIVATE: Final = ((b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer"))
_STREAMED: Final = (
    (b"cache-control", b"no-store, no-transform"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", STREAM.encode()),
)


class RefusedRequest(Exception):
    """Carries a refusal from where it is found to where it is sent."""

    def __init__(
        self, refusal: Refusal, headers: Mapping[str, str] | None = None, id: RequestId | None = None
    ) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.headers = headers
        self.id = id
        """The request that it is the error of, where it is that of one (M6)."""


class ClientGoneError(Exception):
    """The client hung up before its request was whole."""


def not_allowed(method: str, allow: str) -> RefusedRequest:
    """405, with `Allow`."""
    refusal = Refusal(Reason.METHOD_NOT_ALLOWED, f"{method} is not for this endpoint")
    return RefusedRequest(refusal, {"Allow": allow})


def accepts(headers: Headers, *types: str) -> bool:
    """Whether `Accept` admits every one of `types`; an absent header admits all."""
    accept = headers.get("accept")
    if accept is None:
        return True
    named = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return all(t in named or "*/*" in named or t.partition("/")[0] + "/*" in named for t in types)


async def body_chunks(receive: Receive, patience: float) -> AsyncIterator[bytes]:
    """The request's body as it comes.

    It may be waited for `patience` seconds; each KiB that comes earns a second of that back.

    Raises:
        ClientGoneError: it ended early. RefusedRequest: it is too slow.
    """
    clock = asyncio.get_running_loop().time
    more, left = True, patience
    while more:
        since = clock()
        try:
            async with asyncio.timeout(left):
                message = await receive()
        except TimeoutError:
            refusal = Refusal(Reason.REQUEST_TIMEOUT, f"the body did not come within {patience:g} s")
            raise RefusedRequest(refusal, {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        left = min(patience, left - (clock() - since) + len(chunk) / _RATE)
        if chunk:
            yield chunk


async def read_body(receive: Receive, limit: int, patience: float) -> bytes:
    """The whole body, up to `limit` bytes; `patience` and its errors are those of `body_chunks`.

    Raises:
        TooLargeError: it is longer; the rest is not read.
    """
    parts: list[bytes] = []
    size = 0
    async for chunk in body_chunks(receive, patience):
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    kind: str = "http.response",
) -> None:
    """Send one whole response; `kind` is `websocket.http.response` for a denial."""
    raw = [*_PRIVATE]
    if status != 204:
        raw.append((b"content-length", b"%d" % len(body)))
    raw += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    if body and not any(name == b"content-type" for name, _ in raw):
        raw.append((b"content-type", JSON.encode()))
    await send({"type": f"{kind}.start", "status": status, "headers": raw})
    await send({"type": f"{kind}.body", "body": body})


async def respond_json(send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON response."""
    await respond(send, status, msgspec.json.encode(value), headers)


async def refuse(
    scope: Scope,
    receive: Receive,
    send: Send,
    refusal: Refusal,
    headers: Mapping[str, str] | None = None,
    id: RequestId | None = None,
) -> None:
    """Refuse a request, or a handshake by its denial response (§8)."""
    extra = dict(headers or {})
    if refusal.status in (429, 503):
        extra.setdefault("Retry-After", "1")
    if refusal.reason is Reason.UPGRADE_UNAVAILABLE:
        extra |= {"Upgrade": "websocket", "Sec-WebSocket-Protocol": "mcp.v1"}  # U6
        if scope.get("http_version") == "1.1":
            extra["Connection"] = "Upgrade"  # RFC 9110, 7.8: beside `Upgrade`; HTTP/2 has none
    if scope["type"] == "http":
        await respond(send, refusal.status, refusal.body(id), extra)
        return
    if "websocket.http.response" in scope.get("extensions", {}):
        await respond(send, refusal.status, refusal.body(), extra, kind="websocket.http.response")
    else:
        await send(
            {"type": "websocket.close", "code": refusal.row.close or 1008, "reason": refusal.reason.value}
        )
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            # uvicorn reports a disconnect when it has written the denial, and another when the peer
            # is gone; it logs an error if the application leaves before that.
            while True:
                await receive()


async def serve_events(
    live: Live,
    delivery: Delivery,
    principal: Principal,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answer with an event stream: headers at once, then the loop, until it ends or the client goes."""
    serving = Cuttable()

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            serving.cut()

    async def write(control: bytes, data: bytes) -> None:
        await send({"type": "http.response.body", "body": control + data, "more_body": True})

    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    wake = live.attach(delivery.connection, serving.cut, principal.expires)
    watching = asyncio.create_task(watch())
    try:
        async with serving:
            await send({"type": "http.response.start", "status": 200, "headers": [*_STREAMED, *raw]})
            with suppress(StorageError):  # the stream ends; its client resumes, and is told `storage`
                await feed(live, delivery, wake, write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        live.detach(delivery.connection)
        watching.cancel()
        await asyncio.wait({watching})  # whoever asked may receive from now on
