"""Good clients that climb all along: whatever an attack does to the sessions of others shows on theirs."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Final

from gapless.errors import TargetError
from gapless.torture.judge import judge_outcome, judge_rest
from gapless.torture.ladder import Account, Climb, Kind
from gapless.torture.ours import OurSession
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Trace, Trial
from tests.attack.findings import Findings
from tests.attack.target import Target

__all__ = ["Witnesses"]

_RUNGS: Final = 40
_ANSWER: Final = 20.0


class _Watched(Trace):
    """A timeline that knows of refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def note(self, lane: str, what: str) -> None:
        super().note(lane, what)
        if what.lower().startswith("refused"):
            self.refused.append(what)


class Witnesses:
    """One client for each view, and one on a WebSocket.

    Args:
        patience: seconds that a climb may take, on a machine that is as busy as an attack makes it.
        pace: seconds between two rungs.

    Attributes:
        rungs: how many numbered messages they have received.
        climbs: how many calls they have made.
    """

    def __init__(self, url: str, findings: Findings, *, patience: float = 60.0, pace: float = 0.04) -> None:
        self._patience = patience
        self._pace = pace
        self._url = url
        self._findings = findings
        self._trial = Trial("attack", 0, ())
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self.rungs = 0
        self.climbs = 0
        self.cursors: dict[str, bytes] = {}

    async def start(self, target: Target) -> None:
        """Open their sessions, and begin to climb."""
        ways = {"session view": False, "socket": True}
        self._tasks = [asyncio.create_task(self._ours(name, socket)) for name, socket in ways.items()]
        self._tasks.append(asyncio.create_task(self._standard()))
        everyone = asyncio.create_task(self._ready.wait())
        await asyncio.wait({*self._tasks, everyone}, return_when=asyncio.FIRST_COMPLETED)
        everyone.cancel()
        target.strangers = list(self.cursors.values())

    async def stop(self) -> None:
        """Finish what they are at, and judge all of it."""
        self._over = True
        for task, outcome in zip(
            self._tasks, await asyncio.gather(*self._tasks, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, BaseException):
                self._find(f"{task.get_name()}: {type(outcome).__name__}: {outcome}")
        for finding in self._trial.findings:
            self._find(f"{finding.violation.value}: {finding.detail}")
        if not self.climbs:
            self._find("no witness has climbed")

    def trace(self) -> _Watched:
        """A timeline for a client."""
        return _Watched()

    def _find(self, what: str) -> None:
        self._findings.find("witnesses", what)

    async def _ours(self, name: str, socket: bool) -> None:
        trace = self.trace()
        policy = "auto" if socket else "never"
        async with OurSession(self._url, trace, policy=policy, answer_timeout=_ANSWER) as session:
            await session.open()

            async def start(climb: Climb, id: int) -> Account:
                return await session.start(climb, id)

            def position() -> bytes:
                return str(session.machine.cursor).encode()

            await self._climb(name, session, start, position, several=False)
            if session.error is not None:
                self._find(f"{name}: its session is over: {session.error}")
            if socket and not session.bound:
                self._find(f"{name}: it never was on a socket")
        self.refused(name, trace)

    async def _standard(self) -> None:
        trace = self.trace()
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(StandardSession(self._url, trace))
            await session.open()
            if not await session.listen(lasting=True):
                raise TargetError("it has no standalone stream")

            async def start(climb: Climb, id: int) -> Account:
                return session.start(climb, id)

            def position() -> bytes:
                return (session.standalone.last or "0").encode()

            await self._climb("stream view", session, start, position, several=True)
            if session.ended:
                self._find(f"stream view: its session is over: {session.ended}")
        self.refused("stream view", trace)

    async def _climb(self, name, session, start, position, *, several: bool) -> None:
        accounts: list[Account] = []
        for n in itertools.count(1):
            run = f"{self._trial.run}-{name.replace(' ', '-')}-{n}"
            account = await start(Climb(run, _RUNGS, self._pace, tuple(Kind)), n)
            self.climbs += 1
            await session.until(lambda account=account: account.complete, self._patience)
            judge_outcome(self._trial, account, None, several=several)
            accounts.append(account)
            self.rungs += len(account.rungs)
            self.cursors[name] = position()
            if len(self.cursors) == len(self._tasks):
                self._ready.set()
            if self._over or self._trial.failed:
                break
        for account in accounts:
            judge_rest(self._trial, account, None, several=several)

    def refused(self, name: str, trace: _Watched) -> None:
        """What was refused to a client is found."""
        for what in trace.refused[:3]:
            self._find(f"{name}: {what}")
