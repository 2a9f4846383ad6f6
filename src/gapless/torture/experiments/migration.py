"""`migration`: an upgrade that is not quiescent, one past what is evicted, one with an echoed cursor."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import ClassVar, Final, Literal

import httpx2

from gapless.torture.door import DoorSession
from gapless.torture.judge import judge_door
from gapless.torture.ladder import Account, Climb
from gapless.torture.passage import Refused, pass_door
from gapless.torture.reading import sequence_of
from gapless.torture.schedule import Schedule
from gapless.torture.trial import Target, Trial, View, Violation

__all__ = ["Migration"]

_RUNGS: Final = 60
_DELAY: Final = 0.004
_MOST: Final = 20.0
_EVICTABLE: Final = 5000
"""Retention above which eviction is not tried: it would take too long to fill."""

_VARIANTS: Final = ("unquiesced", "evicted", "echoed")


class Migration:
    """Cover the gap or refuse out loud; and never take the server's position for the client's."""

    name: ClassVar = "migration"
    about: ClassVar = "unquiesced upgrade, evicted buffer, echoed cursor"
    views: ClassVar = frozenset({View.SESSION})
    trials: ClassVar = 150
    jobs: ClassVar = 6
    serve: ClassVar[tuple[str, ...]] = ("--retain-events", "40")

    def plan(self, seed: int) -> Schedule:
        """The faults are in the variants."""
        return ()

    async def run(self, target: Target, trial: Trial) -> None:
        """One of the three variants, in turn; each in one step or in two."""
        rng = random.Random(f"migration {trial.seed}")
        variant = _VARIANTS[trial.seed % len(_VARIANTS)]
        steps: Literal[1, 2] = rng.choice((1, 2))
        trial.trace.note("client", f"{variant}, {steps} step{'s' * (steps - 1)}")
        async with DoorSession(target.url, trial.trace) as session:
            await session.open()
            try:
                async with asyncio.timeout(_MOST):
                    match variant:
                        case "unquiesced":
                            await _unquiesced(session, trial, steps, rng)
                        case "evicted":
                            await _evicted(session, trial, steps)
                        case _:
                            await _echoed(session, trial)
            except TimeoutError:
                trial.find(Violation.STUCK, f"{variant}: event {session.seq + 1} does not come")
            except httpx2.HTTPError as error:
                trial.find(Violation.STUCK, f"{variant}: {type(error).__name__}")
            trial.counts[variant] += 1


async def _start(session: DoorSession, trial: Trial, rungs: int, delay: float) -> Account:
    account = session.ledger.start(Climb(trial.run, rungs, delay), 1)
    await session.post(account.climb.request(1))
    return account


async def _read(session: DoorSession, until: int) -> None:
    """Process the event stream up to an event."""
    async with session.events() as answer, aclosing(answer.blocks()) as blocks:
        async for block in blocks:
            session.take(block)
            if session.seq >= until:
                return


async def _watch(session: DoorSession, until: int) -> int:
    """See the server emit up to an event on another stream, without processing any."""
    highest = 0
    async with session.events() as answer, aclosing(answer.blocks()) as blocks:
        async for block in blocks:
            highest = max(highest, sequence_of(block.id) or 0)
            if highest >= until:
                break
    return highest


async def _unquiesced(session: DoorSession, trial: Trial, steps: Literal[1, 2], rng: random.Random) -> None:
    """Events 11–13 are emitted while the client is mid-reconnect; it upgrades from 10."""
    account = await _start(session, trial, 30, _DELAY)
    await _read(session, session.seq + rng.randint(3, 8))
    own = session.seq
    await _watch(session, own + rng.randint(2, 6))
    passed = await pass_door(session, trial, steps)
    if isinstance(passed, Refused):
        told = f"cursor {own} can be covered, and is answered {passed.status} {passed.reason}"
        trial.find(Violation.FORCED, told)
        return
    while not account.complete:
        block = await passed.frames.next()
        if block is None:
            break
        if session.take(block):
            await passed.frames.ack(session.cursor)
    judge_door(trial, session, account)


async def _evicted(session: DoorSession, trial: Trial, steps: Literal[1, 2]) -> None:
    """The buffer has lost what follows the client's cursor: the upgrade must be refused, 409."""
    kept = session.limits.get("retain_events")
    if not isinstance(kept, int) or kept > _EVICTABLE:
        trial.counts["eviction not reached"] += 1
        return
    account = await _start(session, trial, kept + 20, 0.0)
    own = session.seq
    await _watch_to_end(session, own + kept + 10)
    passed = await pass_door(session, trial, steps)
    if isinstance(passed, Refused):
        trial.counts[f"refused {passed.status} {passed.reason}"] += 1
        if passed.status != 409 or passed.reason != "cursor-evicted":
            told = f"an evicted gap is answered {passed.status} {passed.reason}, not 409 cursor-evicted"
            trial.find(Violation.SILENT_CURSOR, told)
        return
    block = await passed.frames.next(0.2)
    if block is not None:
        session.take(block)
    judge_door(trial, session, account, excused=True)
    if session.seq == own:
        trial.find(Violation.FALSE_CAUGHT_UP, f"upgraded past an evicted gap: nothing came after {own}")


async def _watch_to_end(session: DoorSession, until: int) -> None:
    """Another stream follows the server's position until so much has been emitted."""
    at = session.cursor
    while (sequence_of(at) or 0) < until:
        async with session.events(at) as answer, aclosing(answer.blocks()) as blocks:
            if not answer.streams:
                return
            async for block in blocks:
                at = block.id or at
                if (sequence_of(at) or 0) >= until:
                    return


async def _echoed(session: DoorSession, trial: Trial) -> None:
    """The server's own position, heard in a control block or a refusal, stated as if it were processed."""
    account = await _start(session, trial, 20, 0.0)
    await _read(session, session.seq + 3)
    position = await _watch(session, session.seq + 5)
    if position <= session.seq:
        trial.counts["no echo to state"] += 1
        return
    link = session.cursor.partition(".")[2]
    for echo in (str(position), f"{position}.{link}" if link else f"{position}"):
        status, body = await session.upgrade(echo, f"echo {echo}")
        trial.counts["echoes"] += 1
        if status == 0:
            trial.find(Violation.STUCK, f"an upgrade with the echoed cursor {echo} got no answer")
            return
        if status == 200:
            trial.find(Violation.ECHO_BELIEVED, f"the upgrade believed the echoed cursor {echo}: {body}")
            return
        knocked = await session.knock(echo)
        if knocked.frames is not None:
            knocked.frames.drop()
            trial.find(Violation.ECHO_BELIEVED, f"the handshake believed the echoed cursor {echo}")
            return
        async with session.events(echo) as answer:
            if answer.streams:
                trial.find(Violation.ECHO_BELIEVED, f"the event stream believed the echoed cursor {echo}")
                return
    await _read(session, session.seq + 1)
    judge_door(trial, session, account, excused=True)
