"""One session of an MCP server over Streamable HTTP: what goes out, in order, what comes of it, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final

import httpx2

from gapless.backends.base import Backend, Sink
from gapless.backends.modern import Modern, header_value
from gapless.backends.upstream import (
    Headway,
    Place,
    Upstream,
    body,
    messages,
)
from gapless.backends.upstream_call import SERVER_ERROR, Call, refusal
from gapless.backends.upstream_hearing import Hearing
from gapless.errors import BackendError, MalformedError, TooLargeError
from gapless.protocol.jsonrpc import (
    Envelope,
    Kind,
    error_response,
    outcome_unknown,
)
from gapless.protocol.media import JSON, STREAM, media_type

__all__ = ["UpstreamSession"]

_ACCEPTING: Final = 10.0
"""Seconds that a message which has no answer may take to be accepted."""
_INITIALIZING: Final = 60.0
"""Seconds that `initialize` may take in all; for the first `_REACHING` it is tried again if it fails."""
_REACHING: Final = 20.0
_NOTICED: Final = 1.0
"""Seconds that a cancellation waits for its request to arrive, and a loss for what other requests hear."""
_LINGERING: Final = 5.0
"""Seconds in which a server may still say something about a call that was cancelled."""
_LEAVING: Final = 1.0
"""Seconds for each of the steps of a close."""
_FRUITLESS: Final = 8
"""Connections in a row that may bring nothing of a call's stream: some 40 s."""
_PATIENCE: Final = 8.0
"""Seconds between connections at most, unless the server asks for more."""
_IDLE: Final = 30.0
"""The same for the stream on which nobody waits for anything."""
_LIVED: Final = 5.0
"""Seconds after which a connection was of use, whatever it brought."""
_REPEATS: Final = 3

_INTERNAL_ERROR: Final = -32603
_BUSY: Final = (429, 502, 503, 504)
"""Statuses after which it may go better the next time; to a GET, 409 (another is open) and 500 too."""


class UpstreamSession(Backend):
    """One session upstream.

    Messages go out under `_order`, one after the other: a request until it is written, `initialize`
    until it is answered, anything else until it is accepted. Each request has a task, which reads its
    answer, and the standalone stream has one. Whichever hears that the session is gone starts
    `_losing`, which alone calls the sink's `lost`.
    """

    def __init__(
        self, upstream: Upstream, sink: Sink, modern: Modern, limit: int, log: logging.Logger
    ) -> None:
        self._upstream = upstream
        self._sink = sink
        self._modern = modern
        self._hearing = Hearing(upstream, sink, modern, self._answer, log)
        self._limit = limit
        self._log = log
        self._order = asyncio.Lock()
        self._shaken = False
        """Whether there was a handshake. If not, what is no request is of 2026-07-28."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._losing: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    # What the client says ----------------------------------------------------------------------------

    async def send(self, data: bytes, envelope: Envelope) -> None:
        async with self._order:
            if self._gone.is_set():
                raise BackendError(f"{self._upstream.name} is gone")
            if envelope.kind is Kind.REQUEST:
                await self._begin(Call(data, envelope, self._modern.headers(data, envelope)))
            elif self._losing is not None:
                pass  # it would be refused like the others
            elif envelope.method == "notifications/cancelled":
                await self._cancel(data, envelope)
            else:
                await self._tell(data, envelope)
            if self._losing is not None:
                # Not before `lost` has said which requests were not taken; this may be one of them.
                await self._gone.wait()
            if self._gone.is_set():
                raise BackendError(f"{self._upstream.name} is gone")

    async def _begin(self, call: Call) -> None:
        """Start a request, and wait until it is written; for `initialize`, until it is answered."""
        self._hearing.calls[call.id] = call
        call.task = self._spawn(self._run(call))
        call.task.add_done_callback(lambda _: self._over(call))
        if call.initialize:
            await asyncio.wait({call.task})
        else:
            await call.headway.out.wait()

    def _over(self, call: Call) -> None:
        call.over()
        if self._hearing.open(call):
            del self._hearing.calls[call.id]

    async def _cancel(self, data: bytes, envelope: Envelope) -> None:
        """Tell the server that a request is cancelled: not before it has heard of the request."""
        call = None if envelope.target is None else self._hearing.calls.get(envelope.target)
        if call is None:
            return  # it was answered
        call.cancelled = True
        if call.modern is not None:
            call.task.cancel()  # that closes its stream, which is how 2026-07-28 says it
            return
        await _within(_NOTICED, call.heard.wait())
        await self._tell(data, envelope)
        asyncio.get_running_loop().call_later(_LINGERING, call.task.cancel)

    async def _tell(self, data: bytes, envelope: Envelope) -> None:
        """Send what has no answer; what is not accepted is logged and dropped."""
        what = envelope.method or "an answer"
        status = await self._accepted(data, envelope, what)
        if status is None:
            return
        if status == 404 and self._upstream.session is not None:
            self._lose()
        elif status >= 300:
            self._log.warning("%s: %s was answered with %d", self._upstream.name, what, status)
        elif envelope.method == "notifications/initialized" and self._upstream.session is not None:
            await self._listen()

    async def _accepted(self, data: bytes, envelope: Envelope, what: str) -> int | None:
        """The status that a message without an answer got; `None` if it got none."""
        headers = self._upstream.headers()
        if not self._shaken and envelope.method is not None:
            headers["Mcp-Method"] = header_value(envelope.method)
        for last in range(1, _REPEATS + 1):
            headway = Headway()
            try:
                async with (
                    asyncio.timeout(_ACCEPTING),
                    self._upstream.open("POST", headers, data, headway) as response,
                ):
                    if media_type(response.headers) != STREAM:
                        with suppress(TooLargeError):  # else the connection could not be used again
                            await body(response, self._limit)
                    return response.status_code
            except (httpx2.HTTPError, TimeoutError) as error:
                self._log.warning("%s: %s was not accepted: %s", self._upstream.name, what, _told(error))
                # An answer that comes a second time is one that nobody waits for.
                if last == _REPEATS or self._gone.is_set():
                    break
                if headway.begun and envelope.kind is not Kind.RESPONSE:
                    break
        return None

    def _answer(self, data: bytes, envelope: Envelope) -> None:
        """Answer a question of the server that its client is not to see."""
        self._spawn(self._tell(data, envelope))

    # Requests ----------------------------------------------------------------------------------------

    async def _run(self, call: Call) -> None:
        if self._losing is not None:
            await asyncio.Event().wait()  # the loss ends it; it was never sent
        try:
            if call.initialize:
                await self._initialize(call)
            else:
                await self._exchange(call)
        except Exception as error:
            self._log.exception("%s: a request failed", self._upstream.name)
            await self._hearing.settle(
                call, outcome_unknown(call.id, f"{self._upstream.name}: {_told(error)}")
            )

    async def _initialize(self, call: Call) -> None:
        """Shake hands, patiently: where the client had done so before, an error would end its session."""
        self._shaken, self._upstream.session, self._upstream.version = True, None, None
        clock = asyncio.get_running_loop().time
        until, pause = clock() + _REACHING, 0.25
        try:
            async with asyncio.timeout(_INITIALIZING):
                while not await self._exchange(call, last=clock() + pause > until):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PATIENCE / 2)
                    call.headway = Headway()
        except TimeoutError:
            text = f"{self._upstream.name} has not answered initialize in {_INITIALIZING:.0f} s"
            await self._hearing.settle(call, error_response(call.id, SERVER_ERROR, text))

    async def _exchange(self, call: Call, *, last: bool = True) -> bool:
        """Send a request, and hand over all that comes of it; unless it is the `last` try, whether it did."""
        if call.modern is not None:
            headers = call.modern
            if not self._shaken:
                self._upstream.version = headers["MCP-Protocol-Version"]
        else:
            headers = self._upstream.headers()
        place, trouble = Place(), f"{self._upstream.name} ended the stream before its answer"
        try:
            async with self._upstream.open("POST", headers, call.data, call.headway) as response:
                status = response.status_code
                if status == 404 and "Mcp-Session-Id" in headers:
                    call.refused = True
                    await self._lost_with(call)
                if status in _BUSY and not last:
                    return False
                call.heard.set()
                if status == 200 and call.initialize:
                    self._upstream.session = response.headers.get("mcp-session-id")
                if status != 200 or media_type(response.headers) != STREAM:
                    await self._read(call, response)
                    return True
                await self._follow(response, place, call)
        except (httpx2.HTTPError, MalformedError) as error:
            if not last and not call.heard.is_set():
                return False
            trouble = f"{self._upstream.name} broke the connection: {_told(error)}"
            if not call.headway.begun:
                text = f"{self._upstream.name} cannot be reached: {_told(error)}; the request was not sent"
                await self._hearing.settle(
                    call, error_response(call.id, SERVER_ERROR, text, {"reason": "not-sent"})
                )
        except TooLargeError as error:
            await self._hearing.settle_large(call, error)
        if self._hearing.open(call):
            await self._resume(call, place, trouble)
        return True

    async def _read(self, call: Call, response: httpx2.Response) -> None:
        """An answer that is no event stream."""
        data = await body(response, self._limit)
        if response.status_code != 200 or media_type(response.headers) != JSON:
            await self._hearing.settle(call, refusal(self._upstream.name, call, response, data))
            return
        await self._hearing.hear(data, call)
        text = f"{self._upstream.name} answered 200 OK with something that is no answer to the request"
        await self._hearing.settle(call, error_response(call.id, _INTERNAL_ERROR, text))

    # Streams -----------------------------------------------------------------------------------------

    async def _follow(self, response: httpx2.Response, place: Place, call: Call | None) -> None:
        """Hand over an event stream, until it ends or its call is answered."""
        began = asyncio.get_running_loop().time()
        try:
            async with aclosing(messages(response, place, self._limit)) as stream:
                async for data in stream:
                    await self._hearing.hear(data, call)
                    if call is not None and not self._hearing.open(call):
                        return
        finally:
            if asyncio.get_running_loop().time() - began > _LIVED:
                place.fruitless = 0

    async def _resume(self, call: Call, place: Place, trouble: str) -> None:
        """Go on with a stream that has ended without its answer, if the server can; else settle the call."""
        while self._hearing.open(call) and not call.cancelled:
            if place.id is None or call.modern is not None or place.fruitless > _FRUITLESS:
                await self._hearing.settle(call, outcome_unknown(call.id, trouble))
                return
            await asyncio.sleep(place.pause(_PATIENCE))
            place.fruitless += 1
            headers = self._upstream.headers() | {"Last-Event-ID": place.id}
            try:
                async with self._upstream.open("GET", headers) as response:
                    status = response.status_code
                    if status == 200 and media_type(response.headers) == STREAM:
                        await self._follow(response, place, call)
                    elif status == 404 and self._upstream.session is not None:
                        await self._lost_with(call)
                    elif status not in (*_BUSY, 409, 500):
                        trouble += f", and answered {status} when it was asked for the rest"
                        place.id = None
            except (httpx2.HTTPError, MalformedError):
                pass
            except TooLargeError as error:
                await self._hearing.settle_large(call, error)

    async def _listen(self) -> None:
        """Open the standalone stream, and wait a moment for it: what is told before is told to nobody."""
        if self._listening is not None:
            self._listening.cancel()
        listens = asyncio.Event()
        self._listening = self._spawn(self._hold(listens))
        await _within(_NOTICED, listens.wait())

    async def _hold(self, listens: asyncio.Event) -> None:
        """Keep the standalone stream open, for as long as the server offers it."""
        place, offered = Place(), False
        while True:
            place.fruitless += 1
            headers = self._upstream.headers() | ({} if place.id is None else {"Last-Event-ID": place.id})
            try:
                async with self._upstream.open("GET", headers) as response:
                    listens.set()
                    status = response.status_code
                    if status == 200 and media_type(response.headers) == STREAM:
                        offered = True
                        await self._follow(response, place, None)
                    elif status == 404 and offered:
                        self._lose()
                        return
                    elif status not in (*_BUSY, 409, 500):
                        if not offered:
                            return
                        place.id = None  # it may be what the server objects to
            except httpx2.HTTPError:
                pass
            except (TooLargeError, MalformedError) as error:
                self._log.warning("%s: the standalone stream: %s", self._upstream.name, error)
                place.id = None  # or it would come again
            listens.set()
            await asyncio.sleep(place.pause(_IDLE))

    # The end -----------------------------------------------------------------------------------------

    def _spawn(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _lost_with(self, call: Call) -> None:
        """The server says to a call that it has no such session; this never returns."""
        self._lose()
        call.over()
        await asyncio.Event().wait()

    def _lose(self) -> None:
        if self._losing is None:
            self._losing = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Say that the session is gone, and which requests it did not take: others may be about to hear."""
        await _within(_NOTICED, self._all_heard())
        self._upstream.session = None  # there is none to delete
        untaken = {call.id for call in self._hearing.calls.values() if call.refused or not call.headway.begun}
        for task in self._tasks:
            task.cancel()
        self._hearing.over = True
        await self._sink.lost(f"{self._upstream.name} has forgotten the session", frozenset(untaken))
        self._gone.set()

    async def _all_heard(self) -> None:
        for call in [*self._hearing.calls.values()]:
            await call.heard.wait()

    async def close(self) -> None:
        if self._closing is None:
            # The sink may close us from within: its task then ends by itself, once that returns.
            self._closing = asyncio.create_task(self._close(asyncio.current_task()))
        await asyncio.shield(self._closing)

    async def _close(self, caller: asyncio.Task[Any] | None) -> None:
        self._hearing.over = True
        self._gone.set()
        tasks = {*self._tasks, *([] if self._losing is None else [self._losing])} - {caller}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVING)
        if self._upstream.session is not None:
            with suppress(httpx2.HTTPError, TimeoutError):
                async with asyncio.timeout(_LEAVING), self._upstream.open("DELETE", self._upstream.headers()):
                    pass
        await _within(_LEAVING, self._upstream.close())


async def _within(seconds: float, waiting: Coroutine[Any, Any, Any]) -> None:
    """Wait for something, but not for longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
