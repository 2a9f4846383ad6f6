"""`failover`: upgrades under load beside open sibling streams, the socket dropped, SSE resumed."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import ClassVar, Final, Literal

import httpx2

from gapless.protocol.refusal import read_refusal
from gapless.torture.door import DoorSession, Frames
from gapless.torture.judge import judge_door
from gapless.torture.ladder import Account, Climb
from gapless.torture.passage import Refused, pass_door
from gapless.torture.reading import sequence_of
from gapless.torture.saboteur import Saboteur, sabotage
from gapless.torture.schedule import Schedule
from gapless.torture.trial import Target, Trial, View, Violation

__all__ = ["Failover"]

_RUNGS: Final = 120
_DELAY: Final = 0.004
_SIBLINGS: Final = 2
_MOST: Final = 15.0
_AGAIN: Final = 0.1


class Failover:
    """The cursor is carried across the seam, whatever sibling connections are told meanwhile."""

    name: ClassVar = "failover"
    about: ClassVar = "upgrade under load with sibling streams open, drop the socket, resume SSE"
    views: ClassVar = frozenset({View.SESSION})
    trials: ClassVar = 200
    jobs: ClassVar = 2
    serve: ClassVar[tuple[str, ...]] = ()

    def plan(self, seed: int) -> Schedule:
        """There is one fault, and it is always the same: the socket is dropped."""
        return ()

    async def run(self, target: Target, trial: Trial) -> None:
        """A plain resume, an upgrade, a drop, a resume: one session."""
        rng = random.Random(f"failover {trial.seed}")
        async with (
            sabotage(target, trial.schedule, trial.trace) as (url, saboteur),
            DoorSession(url, trial.trace) as session,
        ):
            await session.open()
            account = session.ledger.start(Climb(trial.run, _RUNGS, _DELAY), 1)
            await session.post(account.climb.request(1))
            siblings = _Siblings(session)
            try:
                async with asyncio.timeout(_MOST):
                    await self._carry(session, account, siblings, saboteur, trial, rng)
            except TimeoutError:
                refused = f"; its request is answered {session.refused}" if session.refused else ""
                trial.find(Violation.STUCK, f"event {session.seq + 1} does not come{refused}")
            except httpx2.HTTPError as error:
                trial.find(Violation.STUCK, f"the stream cannot be resumed: {type(error).__name__}")
            finally:
                siblings.close()
            trial.counts["upgrades"] += 1
            judge_door(trial, session, account)

    async def _carry(
        self,
        session: DoorSession,
        account: Account,
        siblings: _Siblings,
        saboteur: Saboteur,
        trial: Trial,
        rng: random.Random,
    ) -> None:
        """The cursor, from SSE to SSE to a socket and back."""
        steps: Literal[1, 2] = rng.choice((1, 2))
        dropped = rng.choice(("reset", "half-open"))
        await _stream(session, account, rng.randint(5, 15))
        await _stream(session, account, rng.randint(5, 15), trial, "plain resume")
        passed = await pass_door(session, trial, steps, lambda: siblings.highest)
        if isinstance(passed, Refused):
            told = f"the upgrade is answered {passed.status} {passed.reason}"
            trial.find(Violation.FORCED if passed.status else Violation.STUCK, told)
        else:
            trial.measure("upgrade", passed.first_event * 1000)
            await _frames(session, passed.frames, rng.randint(5, 30))
            trial.trace.note("fault", f"the socket is dropped: {dropped}")
            for link in saboteur.streams:
                if link.upgraded:
                    (link.reset if dropped == "reset" else link.black_hole)()
        await _stream(session, account, _RUNGS, trial, f"resume after a {dropped} socket")


class _Siblings:
    """Other event streams of the same session, which read whatever they get."""

    def __init__(self, session: DoorSession) -> None:
        self._session = session
        self.highest = 0
        self._tasks = [asyncio.create_task(self._read()) for _ in range(_SIBLINGS)]

    async def _read(self) -> None:
        try:
            async with self._session.events() as answer, aclosing(answer.blocks()) as blocks:
                async for block in blocks:
                    self.highest = max(self.highest, sequence_of(block.id) or 0)
        except (httpx2.HTTPError, TimeoutError):
            pass  # the one that is judged says it too

    def close(self) -> None:
        """Drop them."""
        for task in self._tasks:
            task.cancel()


async def _stream(
    session: DoorSession, account: Account, count: int, trial: Trial | None = None, name: str = ""
) -> None:
    """Read so many events from the event stream, or until the climb is over; then drop it.

    A refusal because a socket is bound is asked again about, as the protocol has it.
    """
    began = session.trace.now
    while count > 0 and account.result is None:
        async with session.events() as answer, aclosing(answer.blocks()) as blocks:
            if not answer.streams:
                refusal = read_refusal(await answer.body())
                session.refused = f"{answer.status} {'' if refusal is None else refusal.reason.value}"
                await asyncio.sleep(_AGAIN)
                continue
            session.refused = ""
            async for block in blocks:
                if not session.take(block):
                    continue
                if trial is not None and name:
                    trial.measure(name, (session.trace.now - began) * 1000)
                    name = ""
                count -= 1
                if count <= 0 or account.result is not None:
                    return


async def _frames(session: DoorSession, frames: Frames, count: int) -> None:
    """Read so many events from the socket, or until it is silent."""
    while count > 0:
        block = await frames.next()
        if block is None:
            return
        count -= session.take(block)
