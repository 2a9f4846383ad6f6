"""`storm`: everything at random, for a given time."""

from __future__ import annotations

import random
from typing import ClassVar, Final, Literal

from gapless.errors import TargetError
from gapless.torture.judge import judge, judge_runs
from gapless.torture.ladder import Account, Climb, Kind, runs_request
from gapless.torture.ours import OurSession
from gapless.torture.saboteur import Saboteur, sabotage
from gapless.torture.schedule import AT_ONCE, HANDSHAKE, REQUEST, Fault, Schedule, draw
from gapless.torture.standard import QUIET, StandardSession
from gapless.torture.trial import Target, Trial, View, Violation

__all__ = ["Storm"]

_RUNGS: Final = 100
_DELAY: Final = 0.005
_MOST: Final = 45.0


_ANYWHERE: Final = (*AT_ONCE, Fault.CUT_ALL, Fault.OUTAGE, Fault.HALF_OPEN, Fault.CUT_HEAD)
_OURS: Final = (*_ANYWHERE, *REQUEST, *HANDSHAKE, Fault.CUT_RESULT, Fault.MOVE, Fault.MOVE, Fault.MOVE)

_KINDS: Final = tuple(Kind)


class Storm:
    """Sessions of both views with any faults at any moments."""

    name: ClassVar = "storm"
    about: ClassVar = "every fault at random, both views, both ways through the door"
    views: ClassVar = frozenset(View)
    trials: ClassVar = 400
    jobs: ClassVar = 16
    serve: ClassVar[tuple[str, ...]] = ("--keepalive", "0.5", "--probe-timeout", "0.5")

    def plan(self, seed: int) -> Schedule:
        """Two to seven faults."""
        rng = random.Random(f"storm {seed}")
        return draw(rng, _OURS, rng.randint(2, 7), _RUNGS)

    async def run(self, target: Target, trial: Trial) -> None:
        """One session, of whichever view the server has."""
        rng = random.Random(f"storm session {trial.seed}")
        standard = View.SESSION not in target.views or (View.STANDARD in target.views and rng.random() < 0.3)
        kinds = tuple(rng.sample(_KINDS, rng.randint(1, len(_KINDS))))
        climb = Climb(trial.run, _RUNGS, _DELAY, kinds)
        steps: Literal[1, 2] = rng.choice((1, 2))
        async with sabotage(target, trial.schedule, trial.trace) as (url, saboteur):
            if standard:
                await self._standard(url, saboteur, target, trial, climb)
            else:
                policy = rng.choice(("auto", "never"))
                async with OurSession(url, trial.trace, steps=steps, policy=policy) as session:
                    await self._ours(session, saboteur, trial, climb, steps)

    async def _ours(
        self, session: OurSession, saboteur: Saboteur, trial: Trial, climb: Climb, steps: Literal[1, 2]
    ) -> None:
        await session.open()
        saboteur.moved = session.move
        session.received = saboteur.begin(session.ledger)
        account = await session.start(climb, 1)
        await session.until(lambda: account.complete, _MOST)
        trial.counts["sessions of ours"] += 1
        trial.counts["through the door"] += session.bound
        told = session.error is not None
        if told and not (steps == 2 and any(step.fault in HANDSHAKE for step in trial.schedule)):
            trial.find(Violation.FORCED, f"our client's session ended: {session.error}")
        trial.counts["explicit ends"] += told
        judge(trial, account, excused=told)
        self._stuck(trial, account, told)
        saboteur.close()
        if not told:
            await self._check_runs(session, trial, climb.run)

    async def _standard(
        self, url: str, saboteur: Saboteur, target: Target, trial: Trial, climb: Climb
    ) -> None:
        async with StandardSession(url, trial.trace) as session:
            await session.open()
            if not await session.listen():
                climb = Climb(climb.run, climb.rungs, climb.delay)
            session.received = saboteur.begin(session.ledger)
            account = session.start(climb, 1)
            await session.finish(QUIET, _MOST)
            trial.counts["standard sessions"] += 1
            trial.counts["unresumable"] += session.unresumable
            judge(trial, account, excused=bool(session.unresumable))
            self._stuck(trial, account, told=bool(session.unresumable))
            session.url = target.url
            await self._check_runs(session, trial, climb.run)

    async def _check_runs(self, session: OurSession | StandardSession, trial: Trial, run: str) -> None:
        try:
            judge_runs(trial, run, await session.ask(runs_request(2, run)))
        except TargetError as error:
            trial.find(Violation.STUCK, f"after the faults: {error}")

    def _stuck(self, trial: Trial, account: Account, told: bool) -> None:
        if account.result is None and not told:
            trial.find(Violation.STUCK, f"call {account.id} waits, {_MOST:.0f} s after it was made")
