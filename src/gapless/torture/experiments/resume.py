"""`resume`: plain Streamable HTTP, cut at random, resumed with `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import random
import string
from contextlib import aclosing
from typing import ClassVar, Final

import httpx2

from gapless.errors import TargetError
from gapless.torture.judge import judge, judge_runs
from gapless.torture.ladder import Climb, Kind, runs_request
from gapless.torture.reading import Answer
from gapless.torture.saboteur import sabotage
from gapless.torture.schedule import AT_ONCE, Fault, Schedule, Step, draw
from gapless.torture.standard import QUIET, StandardSession
from gapless.torture.trial import RUN, Target, Trial, View, Violation

__all__ = ["Resume"]

_RUNGS: Final = 60
_DELAY: Final = 0.004
_MOST: Final = 25.0

_KINDS: Final = (
    (Kind.PROGRESS, Kind.LOG),
    (Kind.PROGRESS, Kind.STRAY),
    (Kind.PROGRESS, Kind.LOG, Kind.CHANGED, Kind.STRAY),
    (Kind.PROGRESS, Kind.ASK, Kind.STRAY),
)

_PROBES: Final = ("stale", "unknown", "garbage", "other session's", "none")


class Resume:
    """A call and the standalone stream, both cut and resumed; then a cursor the server cannot know."""

    name: ClassVar = "resume"
    about: ClassVar = "Streamable HTTP cut at random moments and resumed; cursors nobody was given"
    views: ClassVar = frozenset({View.STANDARD})
    trials: ClassVar = 200
    jobs: ClassVar = 8
    serve: ClassVar[tuple[str, ...]] = ()

    def plan(self, seed: int) -> Schedule:
        """One to three cuts; in one trial of ten also of the very end, in one of twenty of the beginning."""
        rng = random.Random(f"resume {seed}")
        cuts = (*AT_ONCE, Fault.RESET, Fault.RESET, Fault.CUT_ALL, Fault.OUTAGE, Fault.CUT_HEAD)
        schedule = draw(rng, cuts, rng.randint(1, 3), _RUNGS)
        if rng.random() < 0.1:
            schedule += draw(rng, (Fault.CUT_RESULT, Fault.CUT_END), 1, _RUNGS)
        elif rng.random() < 0.05:
            schedule += (Step(0, Fault.CUT_FIRST.value),)
        return tuple(sorted(schedule))

    async def run(self, target: Target, trial: Trial) -> None:
        """One session: a climb under the schedule, then a probe."""
        rng = random.Random(f"resume probe {trial.seed}")
        climb = Climb(trial.run, _RUNGS, _DELAY, rng.choice(_KINDS))
        async with sabotage(target, trial.schedule, trial.trace) as (url, saboteur):
            async with StandardSession(url, trial.trace) as session:
                await session.open()
                if not await session.listen():
                    climb = Climb(climb.run, _RUNGS, _DELAY, (Kind.PROGRESS, Kind.LOG))
                session.received = saboteur.begin(session.ledger)
                account = session.start(climb, 1)
                await session.finish(QUIET, _MOST)
                self._judge(trial, session, account.id)
                session.url = target.url  # from here on without faults
                await _check_runs(trial, session, climb.run)
                await _probe(trial, session, rng.choice(_PROBES), rng)

    def _judge(self, trial: Trial, session: StandardSession, id: int) -> None:
        account = session.ledger.accounts[0]
        trial.counts["resumes"] += session.resumes
        trial.counts["unresumable"] += session.unresumable
        judge(trial, account, excused=bool(session.unresumable))
        stream = session.streams[id]
        if account.result is None:
            if stream.end == "ended":
                trial.find(Violation.FALSE_CAUGHT_UP, "resumed streams end in good order, without the result")
            elif stream.end == "silent":
                trial.find(
                    Violation.STUCK, "the resumed stream stays open and silent: the call waits for good"
                )


async def _check_runs(trial: Trial, session: StandardSession, run: str) -> None:
    try:
        judge_runs(trial, run, await session.ask(runs_request(2, run)))
    except TargetError:
        trial.counts["runs unknown"] += 1


async def _probe(trial: Trial, session: StandardSession, kind: str, rng: random.Random) -> None:
    """State a cursor that the server cannot know, or an old one; see whether it says so."""
    account = session.ledger.accounts[0]
    stream = session.streams[account.id]
    if stream.first is None or stream.last is None or not account.complete or kind == "none":
        return
    trial.trace.note("client", f"probes with a cursor that is {kind}")
    match kind:
        case "stale":
            await _stale(trial, session, stream.last)
        case "unknown":
            await _unknown(trial, session, _altered(stream.last, session.ids, rng), kind)
        case "garbage":
            await _unknown(trial, session, "garbage", kind)
        case _:
            async with StandardSession(session.url, trial.trace) as other:
                await other.open()
                await _unknown(trial, other, stream.first, kind)


async def _stale(trial: Trial, session: StandardSession, last: str) -> None:
    """The call is over: its stream, asked for after its last event, has nothing more and says so."""
    try:
        async with session.send("GET", cursor=last) as answer:
            found = await _climbed(answer) if answer.streams else None
            if found is not None:
                trial.find(Violation.REPEATED, f"{last} was the last event, and {found[0]} follows")
    except TimeoutError:
        trial.counts["idle after the end"] += 1
    except httpx2.HTTPError:
        pass
    trial.counts["probes: stale"] += 1


async def _unknown(trial: Trial, session: StandardSession, cursor: str, kind: str) -> None:
    trial.counts[f"probes: {kind}"] += 1
    stated = f"the {kind} cursor {cursor!r}"
    try:
        async with session.send("GET", cursor=cursor) as answer:
            if not answer.streams:
                trial.counts[f"refused {answer.status}"] += 1
                return
            try:
                found = await _climbed(answer)
            except TimeoutError:
                found = None
            if found is None:
                trial.find(Violation.SILENT_CURSOR, f"{stated} got {answer.status}, no event")
            elif session.ledger.accounts and found[1] == trial.run:
                trial.find(Violation.REPEATED, f"after {stated} came event {found[0]} again")
            else:
                trial.find(Violation.FOREIGN, f"after {stated} came event {found[0]}, of {found[1]}")
    except (httpx2.HTTPError, TimeoutError) as error:
        trial.find(Violation.STUCK, f"{stated} got no answer: {type(error).__name__}")


async def _climbed(answer: Answer) -> tuple[str, str] | None:
    """The first message of a climb, whoever's: its event ID, and the run that it names.

    Raises:
        TimeoutError: the stream is not over after a second.
        httpx2.HTTPError: the connection broke.
    """
    async with asyncio.timeout(1.0), aclosing(answer.blocks()) as blocks:
        async for block in blocks:
            named = RUN.search((block.data or b"").decode(errors="replace"))
            if named is not None:
                return str(block.id), named[0]
    return None


def _altered(cursor: str, given: set[str], rng: random.Random) -> str:
    """A cursor of the same shape, if there is one, that no stream was given."""
    for _ in range(100):
        text = "".join(_other(letter, rng) for letter in cursor)
        if text not in given:
            return text
    return f"{cursor}0"


def _other(letter: str, rng: random.Random) -> str:
    if letter.isdecimal():
        return rng.choice("123456789")
    return rng.choice("abcdef") if letter in string.hexdigits else letter
