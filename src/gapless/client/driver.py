"""Runs the client machine: its effects become tasks, what comes of them its next inputs.

Knows nothing of the MCP SDK: messages are bytes with an envelope.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, assert_never

from gapless.client.http import Endpoints, Http
from gapless.client.network import Network
from gapless.client.receipts import Receipts, Turn, turn
from gapless.client.sse import DEFAULT_LIMIT, read_stream
from gapless.client.websocket import Socket, knock
from gapless.errors import GaplessError
from gapless.protocol.client import Client, Phase
from gapless.protocol.jsonrpc import Envelope, error_response
from gapless.protocol.moves import (
    CloseSocket,
    CloseStream,
    Delete,
    Delivered,
    Effect,
    Failed,
    Get,
    Input,
    Knock,
    Leave,
    Move,
    Negotiate,
    Open,
    Over,
    Post,
    PostAck,
    Refused,
    Send,
    Settle,
    SocketClosed,
    SocketOpened,
    Start,
    Submit,
    Tick,
)

__all__ = ["Driver", "Observation"]

_KEPT_MOST: Final = 1024
"""Messages that may wait to be received by the server; then the application waits."""
_KEPT_BYTES: Final = 16 * 1024 * 1024
"""The same in bytes, but for the last of them: four of the largest that a server takes by default."""
_LAST_WORDS: Final = 2.0
"""Seconds that a DELETE may take when the client leaves, and with it the answer to a POST /session."""
_CODE: Final = re.compile(r"[a-z-]{1,32}", re.ASCII)
"""An error's code that is written down: some are words of the server's, and a token has 43 characters."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Something that happened, for display and diagnosis."""

    what: str
    transport: str
    cursor: int
    committed: int


class Driver:
    """One session's I/O around one machine.

    Args:
        deliver: takes one message for the application; returns when it has accepted it.
        over: called once when the machine is done, with the error or `None`.
        saving: called before any effect that states the cursor (C4), and when there is progress.
        receipts: told of every event that is processed, and of every turn of the connection.
    """

    def __init__(
        self,
        machine: Client,
        url: str,
        process: str,
        network: Network,
        *,
        deliver: Callable[[bytes], Awaitable[None]],
        over: Callable[[GaplessError | None], None],
        saving: Callable[[bool], None],
        observe: Callable[[Observation], None] | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self.machine = machine
        self._endpoints = Endpoints(url)
        self._process = process
        self._network = network
        self._http = Http(network.client, self._endpoints, process)
        self._deliver = deliver
        self._over = over
        self._saving = saving
        self._observe = observe
        self._receipts = receipts
        self._tasks: set[asyncio.Task[None]] = set()
        self._farewell: asyncio.Task[None] | None = None
        """What decides whether a session is left behind: the POST that opens one, or its DELETE."""
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._sockets: dict[int, Socket] = {}
        self._changed = asyncio.Event()
        self._settled: list[bytes] = []
        self._random = random.Random()

    async def run(self) -> None:
        """Start, and drive the machine until it is over. What is going on then is dropped at once,
        but for a DELETE, and a POST /session that may lead to one: `leave` waits for these."""
        try:
            self.put(Start())
            await asyncio.gather(self._pump(), self._clock())
        finally:
            for task in (*self._tasks, *self._readers.values()):
                if task is not self._farewell:
                    task.cancel()
            for socket in self._sockets.values():
                socket.abort()

    async def submit(self, data: bytes, envelope: Envelope) -> None:
        """Send a message; returns when it is numbered and kept, which is at once unless too many are."""
        outgoing = self.machine.outgoing
        while outgoing.kept >= _KEPT_MOST or outgoing.size >= _KEPT_BYTES:
            if self.machine.phase is Phase.OVER:
                break
            await self._wait()
        self.put(Submit(data, envelope))

    def move(self) -> None:
        """Try the door now."""
        self.put(Move())

    async def leave(self) -> None:
        """End the session, telling the server if it answers in time."""
        self.put(Leave())
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while self._farewell is not None and not self._farewell.done():
                    await self._farewell

    def put(self, input: Input) -> None:
        """One input into the machine, and its effects out into the world."""
        now = asyncio.get_running_loop().time()
        before = self.machine.phase
        effects = self.machine.handle(input, now)
        if isinstance(input, SocketOpened) and self.machine.socket != input.attempt:
            self._drop_socket(input.attempt)
        if self._receipts is not None and self.machine.phase is not before:
            self._note(self._receipts, input, before)
        for effect in effects:
            self._perform(effect)
        if self._observe is not None:
            self._report(input, before)
        self._changed.set()
        self._changed = asyncio.Event()

    # Effects ---------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        session = self.machine.session or ""
        match effect:
            case Open(attempt):
                self._farewell = self._answer(self._http.open(attempt))
            case Get(attempt, cursor):
                self._saving(True)
                url = self._endpoints.session(session, "events")
                reading = read_stream(
                    self._network.client,
                    url,
                    self._process,
                    attempt,
                    cursor,
                    limit=self._limit,
                    timeout=self._network.answer_timeout,
                    put=self.put,
                    room=self._reading,
                )
                self._readers[attempt] = self._spawn(reading)
            case Negotiate(attempt, cursor, nonce):
                self._saving(True)
                self._answer(self._http.negotiate(attempt, session, cursor, nonce))
            case Knock(attempt, cursor, ticket):
                self._saving(True)
                self._readers[attempt] = self._spawn(self._knock(attempt, session, cursor, ticket))
            case Post(attempt, messages):
                self._answer(self._http.post(attempt, session, messages))
            case PostAck(cursor):
                self._saving(True)
                self._spawn(self._http.ack(session, cursor))
            case Send(attempt, frame, states):
                self._saving(states)
                socket = self._sockets.get(attempt)
                if socket is not None:
                    socket.send(frame)
            case CloseStream(attempt):
                self._cancel_reader(attempt)
            case CloseSocket(attempt):
                self._drop_socket(attempt)
            case Delete():
                self._farewell = self._spawn(self._http.delete(session))
            case Settle(id, code, message, data):
                self._settled.append(error_response(id, code, message, data))
            case Over(error):
                self._over(error)
            case _:
                assert_never(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for attempt, reader in list(self._readers.items()):
            if reader is task:
                del self._readers[attempt]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a client task failed", "exception": error, "task": task}
            )
            # What it was to find out would be waited for in vain.
            told = f"the client failed: {type(error).__name__}: {error}"
            self.put(Leave(GaplessError(told, hint="this is a bug: please report it")))

    def _answer(self, request: Coroutine[Any, Any, Input]) -> asyncio.Task[None]:
        async def ask() -> None:
            self.put(await request)

        return self._spawn(ask())

    async def _knock(self, attempt: int, session: str, cursor: Any, ticket: str | None) -> None:
        def put(input: Input) -> None:
            if not isinstance(input, SocketOpened):
                self.put(input)
            else:
                opened.append(input)

        opened: list[SocketOpened] = []
        network = self._network
        socket = await knock(
            self._endpoints.session(session, "events"),
            self._process,
            attempt,
            cursor,
            ticket,
            limit=self._limit,
            network=network,
            put=put,
        )
        if socket is None:
            return
        self._sockets[attempt] = socket
        self._spawn(socket.write())
        self.put(opened[0])
        try:
            await socket.read(attempt, self._limit, self.put, self._has_room)
        finally:
            self._drop_socket(attempt)

    def _drop_socket(self, attempt: int) -> None:
        socket = self._sockets.pop(attempt, None)
        if socket is not None:
            socket.abort()

    def _cancel_reader(self, attempt: int) -> None:
        reader = self._readers.pop(attempt, None)
        if reader is not None:
            reader.cancel()

    @property
    def _limit(self) -> int:
        return self.machine.sending.limit or DEFAULT_LIMIT

    # The application's side --------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Hand events to the application, one at a time; the cursor moves when it has accepted one."""
        while True:
            while self._settled:
                await self._deliver(self._settled.pop(0))
            event = self.machine.take()
            if event is None:
                if self.machine.phase is Phase.OVER:
                    return
                await self._wait()
                continue
            if self.machine.wanted(event):
                await self._deliver(event.data)
            if self._receipts is not None:
                self._receipts.processed(event.id)  # before anything can state it
            self.put(Delivered())
            self._saving(False)

    async def _clock(self) -> None:
        """Tick when the machine asks for it. Backoffs are jittered: up to half as long again."""
        loop = asyncio.get_running_loop()
        while self.machine.phase is not Phase.OVER:
            deadline = self.machine.deadline
            if deadline is not None and self.machine.phase is Phase.RESTING:
                deadline += max(0.0, deadline - loop.time()) * self._random.random() / 2
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wait()
            except TimeoutError:
                self.put(Tick())

    async def _wait(self) -> None:
        """Until the next input. Whoever waits looked at the machine without awaiting in between."""
        await self._changed.wait()

    async def _reading(self) -> None:
        """Until the event stream may be read (U10), and there is room."""
        while not self.machine.reading or self.machine.full:
            await self._wait()

    async def _has_room(self) -> None:
        while self.machine.full:
            await self._wait()

    def _note(self, receipts: Receipts, input: Input, before: Phase) -> None:
        """A line for a turn of the connection. Words of ours and numbers only: a text may hold the token."""
        machine = self.machine
        turned = turn(before, machine.phase)
        if turned is None or machine.session is None:
            return
        match turned, input:
            case Turn.OPENED | Turn.CONTINUED, _:
                detail = str(machine.cursor)
            case Turn.SSE_OPENED | Turn.UPGRADE_ASKED | Turn.HANDSHAKE | Turn.WEBSOCKET_OPENED, _:
                detail = str(machine.incoming.stated)
            case Turn.WEBSOCKET_DROPPED, SocketClosed(code=code):
                detail = str(code)
            case ((Turn.SSE_FAILED | Turn.UPGRADE_FAILED), Refused(_, status, refusal, _)):
                detail = str(status) if refusal is None else f"{status} {refusal.reason.value}"
            case Turn.OVER, _:
                code = "left" if machine.error is None else machine.error.code
                detail = code if _CODE.fullmatch(code) else ""
            case _:
                detail = ""
        receipts.turned(machine.session, turned, detail)

    def _report(self, input: Input, before: Phase) -> None:
        assert self._observe is not None
        phase = self.machine.phase
        what = f"{before.value} → {phase.value}" if phase is not before else type(input).__name__.lower()
        match input:
            case Failed(_, message):
                what += f" ({message})"
            case Refused(_, status, refusal, _):
                what += f" ({status} {'' if refusal is None else refusal.reason.value})"
            case SocketClosed(code=code):
                what += f" ({code})"
            case _:
                pass
        cursor = 0 if self.machine.cursor is None else self.machine.cursor.seq
        self._observe(Observation(what, self.machine.transport, cursor, self.machine.committed))
