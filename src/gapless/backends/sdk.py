"""In-process MCP servers of the official SDK, 2.x: `MCPServer` and the low-level `Server`.

Each session gets its own server loop, of the protocol era that its client opens with: the
`initialize` handshake, or 2026-07-28's envelope on every request. The server object and its lifespan
are shared by all of them.

Apart from `client/transport.py` the one module that imports `mcp`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Self, cast

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.server import MCPServer, Server
from mcp.server.runner import serve_dual_era_loop
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from gapless.backends.base import Backend, Sink
from gapless.errors import BackendError, MalformedError, UsageError
from gapless.protocol.jsonrpc import Envelope, Kind, error_response, peek

__all__ = ["SdkBackends"]

_log: Final = logging.getLogger("gapless.backends.sdk")

_TURN: Final = 64
"""Messages that a handler may write before others have their turn."""
_GRACE: Final = 1.5
"""Seconds a session's loop has to end, twice: once it is told so, and once it is cancelled."""


class SdkBackends:
    """Opens sessions on `server`.

    Raises:
        UsageError: `server` is neither an `MCPServer` nor a low-level `Server`.
    """

    spawns = False

    def __init__(self, server: object) -> None:
        self._server = _low_level(server)
        self._leave = asyncio.Event()
        self._lifespan: asyncio.Task[None] | None = None
        self._state: Any = None

    async def start(self) -> None:
        """Enter the server's lifespan.

        Raises:
            UsageError: it was entered before.
            Exception: whatever the lifespan raises; it may be tried again.
        """
        if self._lifespan is not None:
            raise UsageError("these backends have been started before", hint="make new ones")
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: who enters a lifespan must leave it, and `close` may come from anywhere.
        self._lifespan = asyncio.create_task(self._live(entered))
        await asyncio.wait({self._lifespan, entered}, return_when=asyncio.FIRST_COMPLETED)
        if not entered.done():
            failed, self._lifespan = self._lifespan, None
            await failed

    async def _live(self, entered: asyncio.Future[None]) -> None:
        async with self._server.lifespan(self._server) as self._state:
            entered.set_result(None)
            await self._leave.wait()

    async def open(self, sink: Sink) -> Backend:
        """Start a server loop.

        Raises:
            BackendError: the server's lifespan has not been entered, or has ended.
        """
        if self._lifespan is None or self._lifespan.done():
            raise BackendError(f"the MCP server {self._server.name!r} is not running", hint="start it first")
        return _SdkBackend(self._server, self._state, sink)

    async def close(self) -> None:
        """Leave the server's lifespan. Idempotent.

        Raises:
            Exception: whatever the lifespan raises.
        """
        self._leave.set()
        if self._lifespan is not None:
            await self._lifespan


class _Runs:
    """Hands messages to a sink: plain ones in runs, until another comes or the loop has its next turn."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._run: list[bytes] = []
        self._envelope: Envelope
        self._related: RequestId | None
        self._waits: set[asyncio.Future[None]] = set()

    def add(self, data: bytes, envelope: Envelope, related: RequestId | None) -> None:
        """Take a message; who has more of them waits for `room`."""
        if not envelope.plain:
            self.hand_over()
            self._emit(data, envelope, related, ())
            return
        if self._run and related != self._related:
            self.hand_over()
        if not self._run:
            self._envelope, self._related = envelope, related
            asyncio.get_running_loop().call_soon(self.hand_over)
        self._run.append(data)

    def hand_over(self) -> None:
        """Hand over what was gathered."""
        if self._run:
            (first, *more), self._run = self._run, []
            self._emit(first, self._envelope, self._related, tuple(more))

    def drop(self) -> None:
        """Nobody wants any of it."""
        self._run.clear()

    def _emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...]
    ) -> None:
        full = self._sink.emit(data, envelope, related, more)
        if full is not None:
            self.wait_for(full)

    def wait_for(self, awaited: Awaitable[None]) -> None:
        """There is no room before that is done."""
        waiting = asyncio.ensure_future(awaited)
        self._waits.add(waiting)
        waiting.add_done_callback(self._waits.discard)

    @property
    def full(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._waits)

    async def room(self) -> None:
        """Wait until the sink takes more."""
        while self._waits:
            await asyncio.wait(self._waits)


class _Outlet:
    """What a server loop writes to (the SDK's `WriteStream`).

    A message is taken at once. A handler that writes and writes lets others have their turn now and then.
    """

    def __init__(self, take: Callable[[SessionMessage], None], runs: _Runs) -> None:
        self._take = take
        self._runs = runs
        self._taken = 0
        self.closed = False

    async def send(self, item: SessionMessage, /) -> None:
        if self.closed:
            raise anyio.ClosedResourceError
        self._take(item)
        self._taken += 1
        if self._runs.full:
            await self._runs.room()
        elif self._taken % _TURN == 0:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()


class _SdkBackend(Backend):
    """One server loop, which writes straight into the sink.

    What it reads waits until the server has taken it: that stream holds nothing.
    """

    def __init__(self, server: Server[Any], state: Any, sink: Sink) -> None:
        self._name = server.name
        self._sink = sink
        self._to_server, from_client = anyio.create_memory_object_stream[SessionMessage | Exception]()
        self._closing: asyncio.Task[None] | None = None
        self._runs = _Runs(sink)
        self._outlet = _Outlet(self._hand_over, self._runs)
        self._serving = asyncio.create_task(
            serve_dual_era_loop(server, from_client, self._outlet, lifespan_state=state)
        )
        self._following = asyncio.create_task(self._follow())

    async def send(self, data: bytes, envelope: Envelope) -> None:
        try:
            message = jsonrpc_message_adapter.validate_json(data, by_name=False)
        except ValidationError as error:
            await self._refuse(envelope, error)
        else:
            await self._put(self._to_server, message)

    async def close(self) -> None:
        if self._closing is None:
            # What handlers still write fails at once, rather than be heard by anybody.
            self._outlet.close()
            self._runs.drop()
            # The sink may close us from within: its task then ends by itself, once that returns.
            from_within = asyncio.current_task() is self._following
            self._closing = asyncio.create_task(self._close(from_within))
        await asyncio.shield(self._closing)

    async def _close(self, from_within: bool) -> None:
        if not from_within:
            self._following.cancel()
            await asyncio.wait({self._following})
        self._to_server.close()
        await asyncio.wait({self._serving}, timeout=_GRACE)
        self._serving.cancel()
        await asyncio.wait({self._serving}, timeout=_GRACE)
        if self._serving.done():
            _outcome(self._serving)
        else:  # a thread, which nobody can stop, or a handler that will not be cancelled
            _log.warning("%s: a closed session's handler still runs", self._name)

    async def _follow(self) -> None:
        """See the server loop to its end; then say how it ended, unless closed."""
        await asyncio.wait({self._serving})
        self._outlet.close()
        self._runs.hand_over()
        await self._runs.room()
        error = _outcome(self._serving)
        _log.error("%s: a session's server loop ended", self._name, exc_info=error)
        what = "ended" if error is None else f"failed: {type(error).__name__}: {error}"
        await self._sink.lost(f"the MCP server {self._name!r} {what}")

    def _hand_over(self, written: SessionMessage) -> None:
        message, metadata = written.message, written.metadata
        related = metadata.related_request_id if isinstance(metadata, ServerMessageMetadata) else None
        try:
            data = _json(message)
            notice = _notice(message.method) if isinstance(message, JSONRPCNotification) else None
            envelope = notice or peek(data)
        except (PydanticSerializationError, MalformedError) as error:
            _log.warning("%s: a message that is no valid JSON: %s", self._name, error)
            self._replace(message, f"no valid JSON: {error}")
        else:
            self._runs.add(data, envelope, related)

    def _replace(self, message: JSONRPCMessage, trouble: str) -> None:
        """Answer in place of a message that must not leave (W4); one that nobody awaits is dropped."""
        if isinstance(message, JSONRPCRequest):
            self._runs.wait_for(
                self._answer(_error(message.id, INVALID_REQUEST, f"unusable request: {trouble}"))
            )
        elif not isinstance(message, JSONRPCNotification):
            told = f"unusable answer of the MCP server: {trouble}"
            answer = error_response(message.id, INTERNAL_ERROR, told)
            self._runs.add(answer, Envelope(Kind.RESPONSE, id=message.id), None)

    async def _answer(self, answer: JSONRPCError) -> None:
        with suppress(BackendError):  # `lost` is next
            await self._put(self._to_server, answer)

    async def _refuse(self, envelope: Envelope, error: ValidationError) -> None:
        """Answer in place of a client's message that the SDK cannot read; else drop it."""
        unparsed = error.errors()[0]["type"] == "json_invalid"
        code = INVALID_REQUEST if unparsed else INVALID_PARAMS
        trouble = "nested too deep" if unparsed else "a member of the wrong type"
        if envelope.kind is Kind.REQUEST:
            assert envelope.id is not None
            if self._outlet.closed:
                raise BackendError(f"the MCP server {self._name!r} is gone")
            answer = error_response(envelope.id, code, f"unusable request: {trouble}")
            self._runs.add(answer, Envelope(Kind.RESPONSE, id=envelope.id), None)
            await self._runs.room()
        elif envelope.kind is Kind.RESPONSE and envelope.id is not None:
            told = f"unusable answer of the client: {trouble}"
            await self._put(self._to_server, _error(envelope.id, INTERNAL_ERROR, told))
        else:
            _log.warning("%s: dropped a client's message: %s", self._name, trouble)

    async def _put(self, stream: MemoryObjectSendStream[SessionMessage], message: JSONRPCMessage) -> None:
        try:
            await stream.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise BackendError(f"the MCP server {self._name!r} is gone") from None


def _json(message: JSONRPCMessage) -> bytes:
    """What `model_dump_json` writes, without the time that it takes to get there."""
    return type(message).__pydantic_serializer__.to_json(message, by_alias=True, exclude_unset=True)


@lru_cache(256)
def _notice(method: str) -> Envelope | None:
    """The envelope of a plain notification: no peek, for it was just written."""
    envelope = Envelope(Kind.NOTIFICATION, method=method)
    return envelope if envelope.plain else None


def _low_level(server: object) -> Server[Any]:
    if isinstance(server, MCPServer):
        # As the SDK's own in-memory transport does; the public way (`streamable_http_app`) has
        # side effects. `test_an_mcp_server_has_a_low_level_one` stands guard.
        return cast("MCPServer[Any]", server)._lowlevel_server  # pyright: ignore[reportPrivateUsage]
    # What FastMCP calls its own; `test_a_fastmcp_has_a_low_level_one` says what is looked at.
    inner = getattr(server, "_mcp_server", server)
    if isinstance(inner, Server):
        return cast("Server[Any]", inner)
    raise UsageError(
        f"{type(server).__name__} is no MCP server",
        hint="pass an MCPServer or a Server of the SDK, or a FastMCP",
    )


def _error(id: RequestId, code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=code, message=message))


def _outcome(serving: asyncio.Task[None]) -> BaseException | None:
    """What made a server loop end, if it did not do so by itself; task groups do not count."""
    error = None if serving.cancelled() else serving.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
