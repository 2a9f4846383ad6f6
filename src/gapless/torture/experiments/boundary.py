"""`boundary`: a reset after `upgrade-accepted` is durable and before the handshake has arrived."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any, ClassVar, Final

import httpx2

from gapless.torture.door import DoorSession, reason_of
from gapless.torture.faults import Direction, Link
from gapless.torture.judge import judge
from gapless.torture.ladder import Climb
from gapless.torture.ours import OurSession
from gapless.torture.reading import json_object
from gapless.torture.saboteur import Saboteur, sabotage
from gapless.torture.schedule import Fault, Schedule, Step
from gapless.torture.trial import Target, Trial, View, Violation

__all__ = ["Boundary"]

_RUNGS: Final = 12
_DELAY: Final = 0.015
_WINDOW: Final = (0.040, 0.090)
"""Seconds between the acceptance and the reset."""
_MOST: Final = 15.0
_BURN_MOST: Final = 2.0
"""Seconds without a refusal after which a resume at the boundary is called a deadlock."""
_RESUMERS: Final = 10
"""One trial in so many has, besides our client, one that resumes SSE at the boundary."""

_VARIANTS: Final = ("at U", "without a cursor", "another nonce")


class Boundary:
    """Our client must get through with its session; one that resumes SSE must be refused at once."""

    name: ClassVar = "boundary"
    about: ClassVar = "reset 40–90 ms after upgrade-accepted, before the handshake arrives"
    views: ClassVar = frozenset({View.SESSION})
    trials: ClassVar = 12_000
    jobs: ClassVar = 10
    serve: ClassVar[tuple[str, ...]] = ()

    def plan(self, seed: int) -> Schedule:
        """When our client goes to the door."""
        return (Step(random.Random(f"boundary {seed}").randrange(1, 5), Fault.MOVE.value),)

    async def run(self, target: Target, trial: Trial) -> None:
        """Our client, and in one trial of ten a client that resumes at the boundary as well."""
        rng = random.Random(f"boundary window {trial.seed}")
        await self._ours(target, trial, rng.uniform(*_WINDOW))
        if trial.seed % _RESUMERS == 0:
            variant = _VARIANTS[trial.seed // _RESUMERS % len(_VARIANTS)]
            await self._resumer(target, trial, rng.uniform(*_WINDOW), variant)

    async def _ours(self, target: Target, trial: Trial, window: float) -> None:
        async with sabotage(target, trial.schedule, trial.trace) as (url, saboteur):
            ambush = _Ambush(saboteur, window)
            async with OurSession(url, trial.trace, steps=2) as session:
                await session.open()
                saboteur.moved = session.move
                session.received = saboteur.begin(session.ledger)
                account = await session.start(Climb(trial.run, _RUNGS, _DELAY), 1)
                await session.until(lambda: account.complete and session.bound > 0, _MOST)
                trial.counts["resets"] += ambush.struck
                trial.counts["through the door"] += bool(session.bound)
                if session.error is not None:
                    told = f"our client's session ended: {session.error}"
                    trial.find(Violation.FORCED, told)
                elif not session.bound and session.machine.transport == "sse" and account.complete:
                    # Its 101 came after it had given the handshake up: the ticket is spent, and SSE goes on.
                    trial.counts["back on SSE"] += 1
                elif not session.bound:
                    trial.find(Violation.STUCK, f"our client is not through the door after {_MOST:.0f} s")
                if len(session.acceptances) > 1:
                    trial.find(Violation.DUAL_NEGOTIATION, _several(session.acceptances))
                judge(trial, account, excused=session.error is not None)
                if ambush.struck and ambush.bound_at:
                    trial.measure("our recovery", (ambush.bound_at - ambush.struck_at) * 1000)

    async def _resumer(self, target: Target, trial: Trial, window: float, variant: str) -> None:
        """A client that treats `upgrade-accepted` as a checkpoint, in one of three ways."""
        trial.trace.note("client", f"now a client that resumes at the boundary, {variant}")
        async with sabotage(target, (), trial.trace) as (url, saboteur):
            async with DoorSession(url, trial.trace) as session:
                await session.open()
                account = session.ledger.start(Climb(f"{trial.run}-resumer", 400, 0.005), 1)
                await session.post(account.climb.request(1))
                accepted = await self._negotiate(session)
                if accepted is None:
                    trial.counts["no acceptance"] += 1
                    return
                await asyncio.sleep(window)
                saboteur.cut()
                trial.counts["resumes at the boundary"] += 1
                began = trial.trace.now
                try:
                    async with asyncio.timeout(_BURN_MOST):
                        burned = await self._burn(session, variant, accepted, trial)
                except (TimeoutError, httpx2.HTTPError) as error:
                    told = f"a resume {variant} got an idle stream: deadlock ({type(error).__name__})"
                    trial.find(Violation.STUCK, told)
                    return
                if burned:
                    trial.counts["burned"] += 1
                    trial.measure("burned after", (trial.trace.now - began) * 1000)
                    await self._stays_burned(session, trial)
                    if variant == "at U" and account.result is None:
                        trial.find(Violation.UNANSWERED, "the session is burned, its open call not answered")

    async def _negotiate(self, session: DoorSession) -> str | None:
        """Ask for the door while events flow; the ID of `upgrade-accepted`, once the stream brings it."""
        asked: asyncio.Task[object] | None = None
        try:
            async with session.events() as answer, aclosing(answer.blocks()) as blocks:
                async for block in blocks:
                    session.take(block)
                    if asked is None and session.ledger.count >= 3:
                        asked = asyncio.create_task(session.upgrade(session.cursor, "resumer"))
                    if block.event == "upgrade-accepted":
                        return block.id
        except (httpx2.HTTPError, TimeoutError):
            pass  # there is none
        finally:
            if asked is not None:
                await asked
        return None

    async def _burn(self, session: DoorSession, variant: str, accepted: str, trial: Trial) -> bool:
        """Do what must be refused; whether it was."""
        if variant == "another nonce":
            status, body = await session.upgrade(accepted, "another")
            return _refused(trial, variant, status, body)
        async with session.events(accepted if variant == "at U" else None) as answer:
            if not answer.streams:
                return _refused(trial, variant, answer.status, json_object(await answer.body()) or {})
            async with aclosing(answer.blocks()) as blocks:
                async for block in blocks:
                    session.take(block)
                    if block.event == "upgrade-accepted" and block.id != accepted:
                        trial.find(Violation.DUAL_NEGOTIATION, _several({accepted, str(block.id)}))
                        return False
                    if block.event == "session-superseded":
                        return True
        trial.find(Violation.NOT_BURNED, f"a resume {variant} ended without session-superseded")
        return False

    async def _stays_burned(self, session: DoorSession, trial: Trial) -> None:
        """The token is good for nothing any more (B4)."""
        for status, body in (
            await session.upgrade(session.cursor, "later"),
            await session.request("POST", "ack", {"cursor": session.cursor}),
        ):
            reason = reason_of(body)
            if status != 404 or reason != "session-superseded":
                trial.find(Violation.NOT_BURNED, f"a burned token is answered {status} {reason}")


class _Ambush:
    """Resets every connection a while after the acceptance has passed, and lets no handshake pass before."""

    def __init__(self, saboteur: Saboteur, window: float) -> None:
        self._saboteur = saboteur
        self._window = window
        self._sprung = False
        self.struck = 0
        self.struck_at = 0.0
        self.bound_at = 0.0
        saboteur.requested = self._requested

    def _requested(self, link: Link) -> None:
        if link.upgraded:
            link.arm(Direction.TO_CLIENT, b"resume-cursor\n", self._bound)
            if not self.struck:
                link.hold(Direction.TO_SERVER)
        elif not self._sprung:
            for pattern in (b"upgrade-accepted", b'"ticket"'):
                link.arm(Direction.TO_CLIENT, pattern, self._accepted)

    def _accepted(self, link: Link) -> None:
        if not self._sprung:
            self._sprung = True
            asyncio.get_running_loop().call_later(self._window, self._strike)

    def _strike(self) -> None:
        self.struck = 1
        self.struck_at = asyncio.get_running_loop().time()
        self._saboteur.trace.note("fault", "reset of every connection")
        self._saboteur.cut()

    def _bound(self, link: Link) -> None:
        self.bound_at = self.bound_at or asyncio.get_running_loop().time()


def _refused(trial: Trial, variant: str, status: int, body: dict[str, Any]) -> bool:
    accepted = status == 200 and "ticket" in body
    if status == 404 and reason_of(body) == "session-superseded":
        return True
    if accepted:
        trial.find(Violation.DUAL_NEGOTIATION, f"a second negotiation was accepted while pending: {body}")
    else:
        trial.find(Violation.NOT_BURNED, f"a resume {variant} is answered {status} {reason_of(body)}")
    return False


def _several(ids: set[str]) -> str:
    return f"several upgrade-accepted in one negotiation: {', '.join(sorted(ids))}"
