"""Our own client on a ladder: the driver as everyone has it, without the MCP SDK on top."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Any, Literal, Self

import httpx2
import msgspec

from gapless.client.driver import Driver
from gapless.client.network import Network
from gapless.client.receipts import Receipts
from gapless.errors import GaplessError, TargetError
from gapless.protocol.block import Block
from gapless.protocol.client import Client, Policy
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import Arrived, Input, Received, Refused
from gapless.protocol.phases import Retry
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Account, Climb, Ledger
from gapless.torture.reading import ASKED, json_object, message_of
from gapless.torture.trial import Trace

__all__ = ["OurSession"]


class _Watched(Driver):
    """The driver, with what it is told on the timeline."""

    watch: Callable[[Input], None]

    def put(self, input: Input) -> None:
        self.watch(input)
        super().put(input)

    async def rest(self) -> None:
        """Wait until everything that was cancelled is over."""
        await asyncio.gather(*self._tasks, *self._readers.values(), return_exceptions=True)


class OurSession:
    """One session of our client.

    Attributes:
        received: called with the count of messages whenever one has been received.
        error: why the session ended, if it did.
        acceptances: IDs of the upgrade-accepted events that were seen.
        bound: how many times it went through the door.
        acknowledged: the highest number of a message that the server has said it has.
        denied: called if it then says less: with the number it had acknowledged, and the lower one.
        receipts: of what was processed, if a file was given for them.
    """

    def __init__(
        self,
        url: str,
        trace: Trace,
        *,
        steps: Literal[1, 2] = 1,
        policy: Policy = "never",
        answer_timeout: float = 3.0,
        retry: Retry | None = None,
        receipts: str | os.PathLike[str] | None = None,
    ) -> None:
        self.trace = trace
        self.ledger = Ledger()
        self.error: GaplessError | None = None
        self.acceptances: set[str] = set()
        self.bound = 0
        self.acknowledged = 0
        self.denied: Callable[[int, int], None] = lambda acknowledged, now: None
        self.receipts = None if receipts is None else Receipts(receipts)
        self._known: dict[int, int] = {}
        self.received: Callable[[int], None] = lambda count: None
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._over = False
        process = secrets.token_urlsafe(12)
        self._http = httpx2.AsyncClient(verify=False, trust_env=False, timeout=httpx2.Timeout(answer_timeout))
        self.machine = Client(policy, steps=steps, process=process, retry=retry)
        self._driver = _Watched(
            self.machine,
            url,
            process,
            Network(self._http, {}, httpx2.Auth(), None, False, answer_timeout),
            deliver=self._deliver,
            over=self._ended,
            saving=lambda now: None,
            observe=None,
            receipts=self.receipts,
        )
        self._driver.watch = self._watch
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        driving = asyncio.create_task(self._driver.run())
        driving.add_done_callback(self._driven)
        self._tasks = [driving, asyncio.create_task(self._reply())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._driver.leave()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._driver.rest()
            await self._http.aclose()
            if self.receipts is not None:
                self.receipts.close()

    def move(self) -> None:
        """Go through the door now."""
        self._driver.move()

    async def submit(self, message: dict[str, Any]) -> None:
        """Send a message."""
        data = msgspec.json.encode({"jsonrpc": "2.0", **message})
        await self._driver.submit(data, peek(data))

    async def open(self) -> None:
        """Shake hands.

        Raises:
            TargetError: that came to nothing.
        """
        await self.ask(INITIALIZE)
        await self.submit(INITIALIZED)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """A request and its answer.

        Raises:
            TargetError: there is none.
        """
        account = self.ledger.start(Climb("", 0, 0.0), message["id"])
        await self.submit(message)
        await self.until(lambda: account.result is not None, ASKED)
        if account.result is None:
            raise TargetError(f"{message['method']} is not answered: {self.error or 'nothing came'}")
        return account.result

    async def start(self, climb: Climb, id: int) -> Account:
        """Begin a climb; its account fills as messages come."""
        account = self.ledger.start(climb, id)
        await self.submit(climb.request(id))
        return account

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, the session is over, or time is up; whether it is so."""
        try:
            async with asyncio.timeout(seconds):
                while not condition() and not self._over:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return condition()

    # What the driver tells ------------------------------------------------------------------------------

    def _watch(self, input: Input) -> None:
        self._compare(input)
        match input:
            case Arrived(_, block, more) if block is not None:
                for each in (block, *more):
                    if each.event == "upgrade-accepted" and each.id is not None:
                        self.acceptances.add(each.id)
                    self.bound += each.event == "resume-cursor"
                    what = f"{each.id} {each.event}" if each.id else each.event
                    self.trace.note("event" if each.id else "client", what)
            case Arrived():
                pass
            case _:
                self.trace.note("client", f"{type(input).__name__} ({self.machine.phase.value})")

    def _compare(self, input: Input) -> None:
        """What a request is answered goes not back behind what was acknowledged before it was made (L6)."""
        for attempt in (self.machine.attempt, self.machine.sending.attempt):
            if attempt is not None:
                self._known.setdefault(attempt, self.acknowledged)
        match input:
            case Arrived(attempt, Block() as block) if block.event in ("received", "resume-cursor"):
                told = (message_of(block) or {}).get("received")
            case Received(attempt, told):
                pass
            case Refused(attempt, _, refusal, _) if refusal is not None:
                told = refusal.received
            case _:
                return
        if not isinstance(told, int):
            return
        if told < self._known.get(attempt, 0):
            self.denied(self._known[attempt], told)
        self.acknowledged = max(self.acknowledged, told)

    async def _deliver(self, data: bytes) -> None:
        reply = self.ledger.take(json_object(data) or {})
        if reply is not None:
            self._replies.put_nowait(reply)
        self._changed.set()
        self.received(self.ledger.count)

    async def _reply(self) -> None:
        while True:
            await self.submit(await self._replies.get())

    def _driven(self, task: asyncio.Task[None]) -> None:
        """A client that breaks is no client that waits."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended(GaplessError(f"our client failed: {type(error).__name__}: {error}", code="failed"))

    def _ended(self, error: GaplessError | None) -> None:
        self.error = error
        self._over = True
        self._changed.set()
