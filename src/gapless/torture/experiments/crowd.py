"""`crowd`: many sessions at once, some of whose clients read slowly or not at all."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Final

from gapless.errors import TargetError
from gapless.torture.door import DoorSession
from gapless.torture.judge import judge
from gapless.torture.ladder import Climb, Kind
from gapless.torture.schedule import Schedule
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Target, Trace, Trial, View, Violation

__all__ = ["Crowd"]

_SESSIONS: Final = 200
_SLOW: Final = 10
_SILENT: Final = 10
_READERS: Final = _SESSIONS - _SLOW - _SILENT

_RUNGS: Final = 20
_DELAY: Final = 0.15
_PAD: Final = 64 * 1024
_FLOOD: Final = 200
"""Messages of `_PAD` bytes for each reader that is slow or silent."""
_MOST: Final = 60.0
_MEMORY: Final = 96.0
"""MiB that the flood, of 250 MiB, may add to the server's memory."""
_SAMPLE: Final = 0.1
_MIB: Final = 1024 * 1024


class Crowd:
    """Readers who read must not notice the ones who do not."""

    name: ClassVar = "crowd"
    about: ClassVar = f"{_SESSIONS} sessions at once, slow readers and non-readers among them"
    views: ClassVar = frozenset({View.STANDARD})
    trials: ClassVar = 1
    jobs: ClassVar = 1
    serve: ClassVar[tuple[str, ...]] = ()

    def plan(self, seed: int) -> Schedule:
        """The readers are the fault."""
        return ()

    async def run(self, target: Target, trial: Trial) -> None:
        """The readers alone, then the same with the others beside them."""
        alone = await self._readers(target, trial, "alone")
        async with _memory(target) as watch:
            bad = [self._slow(target, trial, number) for number in range(_SLOW)]
            bad += [self._silent(target, trial, number) for number in range(_SILENT)]
            tasks = [asyncio.create_task(one) for one in bad]
            try:
                beside = await self._readers(target, trial, "in the crowd")
            finally:
                for task in tasks:
                    task.cancel()
                failures = await asyncio.gather(*tasks, return_exceptions=True)
        trial.counts["readers that read"] += _READERS
        trial.counts["slow or silent"] += sum(isinstance(one, asyncio.CancelledError) for one in failures)
        trial.measure("a climb, alone", statistics.median(alone) * 1000)
        trial.measure("a climb, in the crowd", statistics.median(beside) * 1000)
        if watch:
            grown = (max(watch) - watch[0]) / _MIB
            trial.measure("memory added (MiB)", grown)
            if grown > _MEMORY:
                trial.find(Violation.MEMORY, f"the server grew by {grown:.0f} MiB")

    async def _readers(self, target: Target, trial: Trial, name: str) -> list[float]:
        """How long each took."""
        return await asyncio.gather(*(self._reader(target, trial, f"{name}-{n}") for n in range(_READERS)))

    async def _reader(self, target: Target, trial: Trial, name: str) -> float:
        async with StandardSession(target.url, Trace()) as session:
            began = trial.trace.now
            try:
                await session.open()
            except TargetError as error:
                trial.find(Violation.STUCK, f"a reader {name} cannot begin: {error}")
                return trial.trace.now - began
            began = trial.trace.now
            account = session.start(Climb(f"{trial.run}-{name}", _RUNGS, _DELAY), 1)
            await session.finish(1.0, _MOST)
            if account.result is None:
                trial.find(Violation.DELAYED, f"a reader {name} is not done after {_MOST:.0f} s")
            judge(trial, account, excused=account.result is None)
            return trial.trace.now - began

    def _flood(self, trial: Trial, name: str) -> Climb:
        return Climb(f"{trial.run}-{name}", _FLOOD, 0.0, (Kind.LOG,), _PAD)

    async def _slow(self, target: Target, trial: Trial, number: int) -> None:
        """Reads a block now and then."""
        async with StandardSession(target.url, Trace()) as session:
            await session.open()
            climb = self._flood(trial, f"slow-{number}")
            async with session.send("POST", climb.request(1)) as answer:
                async with aclosing(answer.blocks(_MOST)) as blocks:
                    async for _ in blocks:
                        await asyncio.sleep(0.25)

    async def _silent(self, target: Target, trial: Trial, number: int) -> None:
        """Asks for much, and reads nothing of it: over each kind of connection that the server has."""
        climb = self._flood(trial, f"silent-{number}")
        ways: list[Callable[[Target, Climb], Awaitable[None]]] = [_silent_standard]
        if View.SESSION in target.views:
            ways += [_silent_stream, _silent_socket]
        await ways[number % len(ways)](target, climb)


async def _silent_standard(target: Target, climb: Climb) -> None:
    async with StandardSession(target.url, Trace()) as session:
        await session.open()
        async with session.send("POST", climb.request(1)):
            await asyncio.Event().wait()


async def _silent_stream(target: Target, climb: Climb) -> None:
    async with DoorSession(target.url, Trace()) as session:
        await session.open()
        async with session.events():
            await session.post(climb.request(1))
            await asyncio.Event().wait()


async def _silent_socket(target: Target, climb: Climb) -> None:
    async with DoorSession(target.url, Trace()) as session:
        await session.open()
        knocked = await session.knock(session.cursor)
        if knocked.frames is not None:
            await knocked.frames.next()
            await knocked.frames.ack(session.cursor)
        await session.post(climb.request(1))
        await asyncio.Event().wait()


@asynccontextmanager
async def _memory(target: Target) -> AsyncGenerator[list[float]]:
    """The server's resident memory in bytes, looked at again and again; empty if it cannot be seen."""
    seen: list[float] = []

    async def look() -> None:
        while (now := _resident(target.pid)) is not None:
            seen.append(now)
            await asyncio.sleep(_SAMPLE)

    task = asyncio.create_task(look())
    await asyncio.sleep(0)
    try:
        yield seen
    finally:
        task.cancel()


def _resident(pid: int | None) -> float | None:
    """A process's resident memory in bytes; `None` where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), None)
