"""Runs the client machine: its effects become tasks, what comes of them its next inputs.

Knows nothing of the MCP SDK: messages are bytes with an envelope.
"""

from __future__ import annotations

import asyncio
import random
import re
from asyncio import get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, assert_never

from gapless.client.http import Endpoints, Http
from gapless.client.network import Network
from gapless.client.receipts import Receipts, Turn, turn
from gapless.client.sse import DEFAULT_LIMIT, read_stream
from gapless.client.websocket import Socket, knock
from gapless.errors import GaplessError, UsageError
from gapless.protocol.block import Block
from gapless.protocol.client import Client, Phase
from gapless.protocol.incoming import Event
from gapless.protocol.jsonrpc import Envelope, error_response
from gapless.protocol.moves import (
    Arrived,
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
_DELIVERED: Final = Delivered()
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
        deliver: takes one message for the application; returns when it has accepted it. Without, the
            application comes for its messages: `next`, then `accepted`.
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
        deliver: Callable[[bytes], Awaitable[None]] | None = None,
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
        self._waiting: list[asyncio.Future[None]] = []
        self._told: deque[bytes] = deque()
        self._last: deque[bytes] = deque()
        self._in_hand: Event | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._looking = False
        self._ended = asyncio.Event()
        self._random = random.Random()
        self._clock = get_running_loop().time

    @property
    def over(self) -> bool:
        """Whether the machine is done."""
        return self.machine.phase is Phase.OVER

    async def run(self) -> None:
        """Start, and drive the machine until it is over. What is going on then is dropped at once,
        but for a DELETE, and a POST /session that may lead to one: `leave` waits for these."""
        try:
            self.put(Start())
            if self._deliver is not None:
                await self._pump(self._deliver)
            await self._ended.wait()
        finally:
            self._ended.set()
            self._stop_alarm()
            for task in (*self._tasks, *self._readers.values()):
                if task is not self._farewell:
                    task.cancel()
            for socket in self._sockets.values():
                socket.abort()

    async def submit(self, data: bytes, envelope: Envelope) -> None:
        """Send a message; returns when it is numbered and kept, which is at once unless too many are."""
        outgoing = self.machine.outgoing
        while outgoing.kept >= _KEPT_MOST or outgoing.size >= _KEPT_BYTES:
            if self.over:
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
        machine = self.machine
        before = machine.phase
        effects = machine.handle(input, self._clock())
        if effects or machine.phase is not before:
            self._follow(input, before, effects)
        if self._observe is not None:
            self._report(input, before)
        if not self._looking:
            self._looking = True
            get_running_loop().call_soon(self._look)
        if self._waiting:
            self._wake()

    # Effects ---------------------------------------------------------------------------------------

    def _follow(self, input: Input, before: Phase, effects: Sequence[Effect]) -> None:
        if self._receipts is not None and self.machine.phase is not before:
            self._note(self._receipts, input, before)
        try:
            for effect in effects:
                self._perform(effect)
        except UsageError as error:
            self.fail(error)  # whoever put this in may be no one who could do anything about it
        if self.over:
            self._ended.set()

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
                    read=self._read,
                )
                self._readers[attempt] = self._spawn(reading)
            case Negotiate(attempt, cursor, nonce):
                self._saving(True)
                self._answer(self._http.negotiate(attempt, session, cursor, nonce))
            case Knock(attempt, cursor, ticket):
                self._saving(True)
                self._readers[attempt] = self._spawn(self._knock(attempt, session, cursor, ticket))
            case Post(attempt, messages):
                self._saving(False)
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
                told = self._last if self.over else self._told  # what arrived before the end goes first
                told.append(error_response(id, code, message, data))
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
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something that had to be done failed: what it was to find out would be waited for in vain."""
        if not isinstance(error, UsageError):  # a file of ours cannot be written
            get_running_loop().call_exception_handler({"message": "a client task failed", "exception": error})
            told = f"the client failed: {type(error).__name__}: {error}"
            error = GaplessError(told, hint="this is a bug: please report it")
        self.put(Leave(error))

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
        if self.machine.socket != attempt:
            self._drop_socket(attempt)  # it came too late, or with a wrong echo
        try:
            await socket.read(attempt, self._limit, self.put, self._read)
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

    def tell(self, data: bytes) -> None:
        """Have the application take this message next; it is no event, and moves no cursor."""
        self._told.append(data)
        self._wake()

    async def next(self) -> bytes | None:
        """The application's next message, in its hands until `accepted`; `None` once all is over.

        One reader at a time. To be cancelled here loses nothing.
        """
        while not self._told:
            event = self.machine.take()
            if event is None:
                if self.over:
                    return self._last.popleft() if self._last else None
                await self._wait()
            elif self.machine.wanted(event):
                self._in_hand = event
                return event.data
            else:
                self._accept(event)
        return self._told.popleft()

    def accepted(self) -> None:
        """The application has the message that `next` gave it: only now does the cursor move."""
        event, self._in_hand = self._in_hand, None
        if event is not None:
            self._accept(event)

    def _accept(self, event: Event) -> None:
        try:
            if self._receipts is not None:
                self._receipts.processed(event.id)  # before anything can state it
            self.put(_DELIVERED)
            self._saving(False)
        except UsageError as error:
            self.fail(error)

    async def _pump(self, deliver: Callable[[bytes], Awaitable[None]]) -> None:
        """Hand messages to the application, one at a time."""
        while (data := await self.next()) is not None:
            await deliver(data)
            self.accepted()

    # Time, and those who wait ------------------------------------------------------------------------

    def _look(self) -> None:
        """After the inputs of one turn of the loop: see that the alarm rings in time.

        Backoffs are jittered: up to half as long again.
        """
        self._looking = False
        deadline, now = self.machine.deadline, self._clock()
        if deadline is None or self._ended.is_set():
            return
        if self._alarm is not None and self._alarm.when() <= deadline:
            return
        if self.machine.phase is Phase.RESTING:
            deadline += max(0.0, deadline - now) * self._random.random() / 2
        self._stop_alarm()
        self._alarm = get_running_loop().call_at(deadline, self._ring)

    def _ring(self) -> None:
        """Tick, if what the alarm was set for has not been put off since."""
        self._alarm = None
        deadline = self.machine.deadline
        try:
            if deadline is not None and deadline <= self._clock():
                self.put(Tick())
            else:
                self._look()
        except Exception as error:
            self.fail(error)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _wait(self) -> None:
        """Until the next input. Whoever waits looked at the machine without awaiting in between."""
        waiter = get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _read(self, attempt: int, blocks: Sequence[Block | None]) -> None:
        """Put in what has arrived: events no faster than they are taken, nothing while at the door (U10)."""
        machine, rest = self.machine, deque(blocks)
        while rest:
            block, more = rest.popleft(), list[Block]()
            event = block is not None and block.id is not None
            while not machine.reading or (event and machine.full):
                await self._wait()
            room = machine.room if event else 1
            while len(more) + 1 < room and rest and (other := rest[0]) is not None and other.id is not None:
                more.append(other)
                rest.popleft()
            self.put(Arrived(attempt, block, tuple(more)))

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
