"""Our own client on a ladder: the driver as everyone has it, without the MCP SDK on top."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Literal, Self

import httpx2
import msgspec

from gapless.client.driver import Driver, Network
from gapless.errors import GaplessError, TargetError
from gapless.protocol.client import Client, Policy
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import Arrived, Input
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Account, Climb, Ledger
from gapless.torture.reading import ASKED, json_object
from gapless.torture.trial import Trace

__all__ = ["OurSession"]


class _Watched(Driver):
    """The driver, with what it is told on the timeline."""

    watch: Callable[[Input], None]

    def put(self, input: Input) -> None:
        self.watch(input)
        super().put(input)


class OurSession:
    """One session of our client.

    Attributes:
        received: called with the count of messages whenever one has been received.
        error: why the session ended, if it did.
        acceptances: IDs of the upgrade-accepted events that were seen.
        bound: how many times it went through the door.
    """

    def __init__(
        self,
        url: str,
        trace: Trace,
        *,
        steps: Literal[1, 2] = 1,
        policy: Policy = "never",
        answer_timeout: float = 3.0,
    ) -> None:
        self.trace = trace
        self.ledger = Ledger()
        self.error: GaplessError | None = None
        self.acceptances: set[str] = set()
        self.bound = 0
        self.received: Callable[[int], None] = lambda count: None
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._over = False
        process = secrets.token_urlsafe(12)
        self._http = httpx2.AsyncClient(verify=False, trust_env=False, timeout=httpx2.Timeout(answer_timeout))
        self.machine = Client(policy, steps=steps, process=process)
        self._driver = _Watched(
            self.machine,
            url,
            process,
            Network(self._http, {}, None, False, answer_timeout),
            deliver=self._deliver,
            over=self._ended,
            saving=lambda now: None,
            observe=None,
        )
        self._driver.watch = self._watch
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._driver.run()), asyncio.create_task(self._reply())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._driver.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

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
        match input:
            case Arrived(_, block) if block is not None:
                if block.event == "upgrade-accepted" and block.id is not None:
                    self.acceptances.add(block.id)
                self.bound += block.event == "resume-cursor"
                what = f"{block.id} {block.event}" if block.id else block.event
                self.trace.note("event" if block.id else "client", what)
            case Arrived():
                pass
            case _:
                self.trace.note("client", f"{type(input).__name__} ({self.machine.phase.value})")

    async def _deliver(self, data: bytes) -> None:
        reply = self.ledger.take(json_object(data) or {})
        if reply is not None:
            self._replies.put_nowait(reply)
        self._changed.set()
        self.received(self.ledger.count)

    async def _reply(self) -> None:
        while True:
            await self.submit(await self._replies.get())

    def _ended(self, error: GaplessError | None) -> None:
        self.error = error
        self._over = True
        self._changed.set()
