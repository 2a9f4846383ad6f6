"""`kill`: SIGKILL of the server, again and again, beneath sessions that go on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final

import httpx2

from gapless.client.receipts import Line, read_receipts
from gapless.errors import LogError, TargetError
from gapless.torture.audit.auditor import Source, audit
from gapless.torture.climbers import Climber, OurClimber, StandardClimber
from gapless.torture.ladder import Climb
from gapless.torture.mortal import Journal, Mortal
from gapless.torture.reading import ANSWER, http_client
from gapless.torture.schedule import Schedule
from gapless.torture.trial import Trial, Violation
from gapless.torture.trials import Result, discover

__all__ = ["Kill", "Moment", "Since"]

_WINDOW: Final = (0.020, 0.400)
"""Seconds between what a kill waits for and the kill."""
_STARTING: Final = 0.1
_CLIMBING: Final = 0.3
"""Of how many kills come while the server starts, and of how many only once something has been climbed."""
_RUNG_MOST: Final = 15.0
"""Seconds for which a first rung is waited for."""
_ANSWER_MOST: Final = 30.0
_SETTLED_MOST: Final = 60.0
"""Seconds until the last calls are answered."""
_CAUGHT_UP_MOST: Final = 10.0
_POLL: Final = 0.005
_AGAIN: Final = 0.05


_COUNTED: Final = (
    "kills",
    "killed after it answered",
    "killed after the first rung came",
    "killed after it was started",
    "starts",
    "sessions",
    "through the door",
    "sockets bound at a kill",
    "sessions at the door at a kill",
    "events",
    "calls answered",
    "calls outcome-unknown",
    "calls unresumable",
)
"""What is counted in any case, in the order in which it is told."""


class Since(Enum):
    """What a kill is counted from."""

    START = "it was started"
    ANSWER = "it answered"
    RUNG = "the first rung came"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a process is killed: so many seconds after something.

    Since it was started it is a part of the time that a start takes, from 0 to 1.
    """

    since: Since
    after: float

    def __str__(self) -> str:
        if self.since is Since.START:
            return f"{self.after:.0%} into its start"
        return f"{self.after * 1000:.0f} ms after {self.since.value}"

    @classmethod
    def of(cls, seed: int) -> Moment:
        """The moment of a seed."""
        rng = random.Random(f"kill {seed}")
        kind = rng.random()
        if kind < _STARTING:
            return cls(Since.START, rng.random())
        since = Since.RUNG if kind < _STARTING + _CLIMBING else Since.ANSWER
        return cls(since, rng.uniform(*_WINDOW))


class Kill:
    """Sessions outlive the server's processes, and lose nothing by it.

    A trial is one kill and what follows, up to the next one; its seed says when it comes. Sessions go
    on from trial to trial.
    """

    name: ClassVar = "kill"
    about: ClassVar = "SIGKILL of the server at any moment, started again on the same log"
    trials: ClassVar = 200
    serve: ClassVar[tuple[str, ...]] = ()

    def plan(self, seed: int) -> Schedule:
        """Nothing is done to connections."""
        return ()

    async def run(
        self,
        server: Mortal,
        seeds: Iterator[int],
        *,
        seconds: float | None = None,
        done: Callable[[Trial], None] = lambda trial: None,
    ) -> Result:
        """Kill once for each seed, until they are used up or the time is; then judge what is left.

        Args:
            seconds: nobody is killed after so long.
            done: called after each trial.

        Raises:
            TargetError: the server does not start even once, or cannot be judged.
        """
        result, began = Result(Kill), time.monotonic()

        def finish(trial: Trial) -> None:
            trial.seconds = trial.trace.now
            result.add(trial)
            done(trial)

        first = next(seeds, None)
        if first is None:
            return result
        scene = _Scene(server, first, finish)
        try:
            await scene.begin()
            try:
                for seed in chain([first], seeds):
                    if seconds is not None and time.monotonic() - began > seconds:
                        break
                    await scene.kill(seed)
                await scene.end()
            except TargetError as error:
                scene.trial.find(Violation.STUCK, f"after a kill: {error}")
            finish(scene.trial)
        finally:
            await scene.close()
        result.seconds = time.monotonic() - began
        return result


class _Scene:
    """The server and the climbers, and what is known of them while they go on."""

    def __init__(self, server: Mortal, seed: int, finish: Callable[[Trial], None]) -> None:
        self.url = server.url
        self.folder: Path = server.folder
        self.over = False
        self.trial = Trial(Kill.name, seed, (), since=seed)
        self.trial.counts.update(dict.fromkeys(_COUNTED, 0))
        self.run = self.trial.run
        self.answering = asyncio.Event()
        self._server = server
        self._finish = finish
        self._first = seed
        self._journal = Journal(server.journal)
        self._ours = [
            OurClimber(self, "ours 1", seed, 1),
            OurClimber(self, "ours 2", seed, 1),
            OurClimber(self, "two-step", seed, 2),
        ]
        self._standard = StandardClimber(self, "standard", seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: asyncio.Task[None] | None = None
        self._takes = 0.0
        self._killed: list[float] = []
        self._served = 0.0
        self._answered_at = 0.0
        self._climbed = asyncio.Event()

    @property
    def _climbers(self) -> list[Climber]:
        return [*self._ours, self._standard]

    async def begin(self) -> None:
        """Start the server for the first time, and let the climbers climb.

        Raises:
            TargetError: it does not answer, or cannot be judged.
        """
        await self._start()
        await self._answered()
        await discover(self.url)
        self._tasks = [asyncio.create_task(climber.run()) for climber in self._climbers]

    @property
    def served(self) -> float:
        """For how many seconds the server has answered."""
        now = time.monotonic() - self._answered_at if self.answering.is_set() else 0.0
        return self._served + now

    # What climbers tell -------------------------------------------------------------------------------

    def came(self, rung: bool) -> None:
        """A message was received; what comes while nobody answers is from before the kill."""
        self.trial.counts["events"] += 1
        if not self.answering.is_set():
            return
        now = time.monotonic()
        for killed in self._killed:
            self.trial.measure("from a kill to the first event", (now - killed) * 1000)
        self._killed.clear()
        if rung:
            self._climbed.set()

    def ended(self, climber: Climber, reason: str) -> None:
        """A session is over: no kill may end one whose handshake was answered."""
        self.trial.counts[f"ended: {reason or 'no handshake'}"] += 1
        if reason:
            self.trial.find(Violation.FORCED, f"the session of {climber.name} ended: {reason}")

    def runs(self, climb: Climb) -> int | None:
        """How often a climb has been begun."""
        runs = self._journal.runs()
        return None if runs is None else runs[climb.run]

    # Kills --------------------------------------------------------------------------------------------

    async def kill(self, seed: int) -> None:
        """Kill at the seed's moment, and start anew.

        Raises:
            TargetError: the process that was to be killed did not answer.
        """
        moment = Moment.of(seed)
        await self._reach(moment)
        if self.trial.seed != seed:
            self._finish(self.trial)
            self.trial = Trial(Kill.name, seed, (), since=self._first)
        counts = self.trial.counts
        counts["kills"] += 1
        counts[f"killed after {moment.since.value}"] += 1
        counts["sockets bound at a kill"] += sum(climber.bound for climber in self._ours)
        counts["sessions at the door at a kill"] += sum(climber.at_the_door for climber in self._ours)
        self.trial.trace.note("fault", f"SIGKILL, {moment}")
        await self._interrupt()
        self._served = self.served
        self.answering.clear()
        self._climbed.clear()
        self._killed.append(time.monotonic())
        await self._server.kill()
        await self._start()

    async def _start(self) -> None:
        await self._server.start()
        self._starting = asyncio.create_task(self._begin_to_answer(time.monotonic()))

    async def _begin_to_answer(self, started: float) -> None:
        await _answers(self._server)
        self._answered_at = time.monotonic()
        self.answering.set()
        self._takes = self._answered_at - started
        self.trial.counts["starts"] += 1
        self.trial.measure("a start", self._takes * 1000)
        self.trial.trace.note("client", "the server answers")

    async def _answered(self) -> None:
        if self._starting is not None:
            await self._starting

    async def _interrupt(self) -> None:
        """Nobody waits any longer for the process to answer.

        Raises:
            TargetError: it has ended by itself.
        """
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
            if not self._starting.cancelled():
                self._starting.result()

    async def _reach(self, moment: Moment) -> None:
        if moment.since is Since.START:
            await asyncio.sleep(moment.after * self._takes)
            return
        await self._answered()
        if moment.since is Since.RUNG:
            try:
                async with asyncio.timeout(_RUNG_MOST):
                    await self._climbed.wait()
            except TimeoutError:
                self.trial.counts["lives without a rung"] += 1
        await asyncio.sleep(moment.after)

    # The end ------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """Let everything come to rest, and judge it.

        Raises:
            TargetError: the last process does not answer.
        """
        self.over = True
        try:
            await self._answered()
            async with asyncio.timeout(_SETTLED_MOST):
                for climber in self._climbers:
                    await climber.resting.wait()
            await self._catch_up()
            with self._server.log() as source:
                await self._judge(source)
        except (LogError, TimeoutError) as error:
            self.trial.find(Violation.STUCK, f"after the last kill: {str(error) or 'calls still wait'}")

    async def close(self) -> None:
        """Send the climbers away.

        Raises:
            BaseException: what one of them has died of.
        """
        if self._starting is not None:
            self._starting.cancel()
        for task in self._tasks:
            task.cancel()
        for died in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(died, Exception):
                raise died

    async def _catch_up(self) -> None:
        """Whoever is up to date has every event of the log."""
        until = time.monotonic() + _CAUGHT_UP_MOST
        while True:
            with self._server.log() as source:
                behind = [words for climber in self._climbers if (words := await climber.behind(source))]
            if not behind:
                return
            if time.monotonic() > until:
                for words in behind:
                    self.trial.find(Violation.STUCK, words)
                return
            await asyncio.sleep(_AGAIN)

    async def _judge(self, source: Source) -> None:
        for climber in self._climbers:
            await climber.judge(source)
        for report in await audit(source, self._receipts()):
            if not report.logged:
                told = f"session {report.session} is not in the log"
                self.trial.find(Violation.LOG_BROKEN, told, report.receipts or 1)
            for finding in report.violations:
                self.trial.find(Violation.LOG_BROKEN, f"session {report.session[:16]}, {finding.text}")
            counts = self.trial.counts
            counts["sessions audited"] += 1
            counts["events audited"] += report.committed - report.floor
            counts["receipts audited"] += report.receipts or 0
            counts["requests settled, by the log"] += report.requests.answered

    def _receipts(self) -> Iterator[Line]:
        for climber in self._ours:
            for path in climber.receipts:
                with path.open("rb") as file:
                    yield from read_receipts(file, path.stat().st_size)


async def _answers(server: Mortal) -> None:
    """Wait until a request is answered, whatever with.

    Raises:
        TargetError: the server has ended, or does not answer.
    """
    await server.listens()
    until = time.monotonic() + _ANSWER_MOST
    async with http_client() as client:
        while True:
            try:
                async with asyncio.timeout(ANSWER):
                    await client.get(server.url)
                    return
            except (httpx2.HTTPError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise TargetError(f"the server does not answer: {type(error).__name__}") from None
            await asyncio.sleep(_POLL)
