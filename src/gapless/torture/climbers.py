"""Clients that climb for as long as they are let, on sessions that outlive their server's processes."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from gapless.errors import TargetError
from gapless.protocol.client import Phase
from gapless.protocol.phases import Retry
from gapless.torture.audit.auditor import Source
from gapless.torture.audit.streams import event_ids
from gapless.torture.judge import judge_outcome, judge_rest, judge_stream
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Account, Climb, Kind, Ledger
from gapless.torture.ours import OurSession
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Trace, Trial, Violation

__all__ = ["Climber", "OurClimber", "Scene", "StandardClimber"]

_KINDS: Final = tuple(Kind)
_AT_ONCE: Final = 2
"""Calls that a session has open."""
_MOST: Final = 30.0
"""Seconds of a server that answers after which a call that is not answered never will be."""
_LOOK: Final = 0.5
_RETRY: Final = Retry(first=0.02, most=0.1, attempts=1000, door_first=0.02, door_most=0.1)
"""Our client's patience: no life of a server is so short that it should be missed for a backoff."""


class Scene(Protocol):
    """Where climbers climb, and whom they tell.

    Attributes:
        url: of the server.
        folder: for receipts.
        trial: what is found now is found in it.
        run: names all climbs.
        answering: set while the server answers, as far as is known.
        served: for how many seconds it has.
        over: no further call is to be made.
    """

    url: str
    folder: Path
    trial: Trial
    run: str
    answering: asyncio.Event
    over: bool

    @property
    def served(self) -> float: ...

    def came(self, rung: bool) -> None:
        """A message was received; whether it was a rung."""
        ...

    def ended(self, climber: Climber, reason: str) -> None:
        """A session is over, for a reason that was told."""
        ...

    def runs(self, climb: Climb) -> int | None:
        """How often a climb has been begun, if anybody knows."""
        ...


class _Relay(Trace):
    """Notes everything on the timeline of the scene's trial, with the climber's name."""

    def __init__(self, scene: Scene, name: str) -> None:
        super().__init__()
        self._scene = scene
        self._name = name

    def note(self, lane: str, what: str) -> None:
        self._scene.trial.trace.note(lane, f"{what} ({self._name})")


class Climber(ABC):
    """A client that climbs, on one session after another.

    Attributes:
        resting: set while no call waits for its answer.
        accounts: the calls of all its sessions.
    """

    several: bool = False

    def __init__(self, scene: Scene, name: str, seed: int) -> None:
        self.scene = scene
        self.name = name
        self.resting = asyncio.Event()
        self.resting.set()
        self._open = 0
        self.accounts: list[Account] = []
        self._trace = _Relay(scene, name)
        self._rng = random.Random(f"kill {seed} {name}")
        self._sessions = 0
        self._ids = 0
        self._rungs = 0
        self._live = False

    async def run(self) -> None:
        """Climb until cancelled."""
        while True:
            await self.scene.answering.wait()  # to begin while nobody answers costs more than it brings
            self._sessions += 1
            self._rungs = 0
            self.scene.trial.counts["sessions"] += 1
            try:
                await self._session()
            except TargetError as error:  # a kill has cut its beginning
                self._trace.note("client", f"no session: {error}")
                self.scene.ended(self, "")

    @abstractmethod
    async def _session(self) -> None:
        """One session until its end, of which the scene is told.

        Raises:
            TargetError: its handshake got no answer.
        """

    async def _climb(self, session: OurSession | StandardSession, ended: Callable[[], bool]) -> None:
        """Call after call, two at a time, until the session is over."""
        self._live = True

        async def calls() -> None:
            while not ended():
                if self.scene.over:
                    await session.until(lambda: False, 3600.0)
                else:
                    await self._call(session, ended)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(calls())
        finally:
            self._live = False

    async def _call(self, session: OurSession | StandardSession, ended: Callable[[], bool]) -> None:
        self._ids += 1
        rng = self._rng
        climb = Climb(
            f"{self.scene.run}-{self.name.replace(' ', '-')}-{self._ids}",
            rng.choice((1, 5, 20, 60)),
            rng.choice((0.0, 0.0, 0.002)),
            tuple(rng.sample(_KINDS, rng.randint(1, len(_KINDS)))),
            rng.choice((0, 0, 2000)),
        )
        self._open += 1
        self.resting.clear()
        try:
            account = session.start(climb, self._ids)
            account = account if isinstance(account, Account) else await account
            await self._answer(session, account, ended)
        finally:
            self._open -= 1
            if not self._open:
                self.resting.set()
        trial = self.scene.trial
        self.accounts.append(account)
        if self._lost(session, account):
            trial.counts["calls unresumable"] += 1
        elif ended() and not account.answered and not account.outcome_unknown:
            trial.counts["calls of sessions that ended"] += 1
        else:
            judge_outcome(trial, account, self.scene.runs(climb), several=self.several)

    async def _answer(
        self, session: OurSession | StandardSession, account: Account, ended: Callable[[], bool]
    ) -> None:
        """Wait until a call is answered, or never will be."""
        until = self.scene.served + _MOST
        while account.result is None and not ended() and self.scene.served < until:
            await session.until(lambda: account.result is not None, _LOOK)

    def _lost(self, session: Any, account: Account) -> bool:
        """Whether the call was cut before the client had anything to ask for it with."""
        return False

    def _received(self, ledger: Ledger) -> None:
        rung, self._rungs = ledger.rungs != self._rungs, ledger.rungs
        self.scene.came(rung)

    @abstractmethod
    async def behind(self, source: Source) -> str:
        """How its session and the log differ, in words; empty if they do not."""

    async def judge(self, source: Source) -> None:
        """Note what only time could tell, and the log."""
        for account in self.accounts:
            judge_rest(self.scene.trial, account, self.scene.runs(account.climb), several=self.several)


class OurClimber(Climber):
    """Our client, which goes through the door whenever it may.

    Attributes:
        session: the latest.
        receipts: what each of its sessions processed.
    """

    def __init__(self, scene: Scene, name: str, seed: int, steps: Literal[1, 2]) -> None:
        super().__init__(scene, name, seed)
        self._steps: Literal[1, 2] = steps
        self.session: OurSession | None = None
        self.receipts: list[Path] = []
        self._acknowledged: dict[str, int] = {}
        self._bound = 0

    @property
    def bound(self) -> bool:
        """Whether it holds a socket now."""
        return self.session is not None and self.session.machine.phase in (Phase.BRIDGING, Phase.BOUND)

    @property
    def at_the_door(self) -> bool:
        """Whether it is on its way through the door."""
        return self.session is not None and self.session.machine.phase in (Phase.NEGOTIATING, Phase.KNOCKING)

    async def _session(self) -> None:
        self.receipts.append(self.scene.folder / f"{self.name.replace(' ', '-')}-{self._sessions}.receipts")
        session = OurSession(
            self.scene.url,
            self._trace,
            steps=self._steps,
            policy="auto",
            retry=_RETRY,
            receipts=self.receipts[-1],
        )

        def ended() -> bool:
            return session.error is not None

        async with session:
            self.session, self._bound = session, 0
            session.received = lambda count: self._progressed(session)
            session.denied = self._denied
            try:
                greeting = session.ledger.start(Climb("", 0, 0.0), INITIALIZE["id"])
                await session.submit(INITIALIZE)
                await self._answer(session, greeting, ended)
                if greeting.result is None and not ended():
                    self.scene.trial.find(Violation.STUCK, f"{self.name}: initialize is not answered")
                elif "result" in (greeting.result or {}):
                    await session.submit(INITIALIZED)
                    await self._climb(session, ended)
            finally:
                if session.machine.session is not None:
                    self._acknowledged[_hash(session.machine.session)] = session.acknowledged
            self.scene.ended(self, "" if session.error is None else session.error.code)

    def _progressed(self, session: OurSession) -> None:
        self.scene.trial.counts["through the door"] += session.bound - self._bound
        self._bound = session.bound
        self._received(session.ledger)

    def _denied(self, acknowledged: int, now: int) -> None:
        told = f"{self.name}: message {acknowledged} was acknowledged, and then {now} was the last received"
        self.scene.trial.find(Violation.DENIED, told)

    async def behind(self, source: Source) -> str:
        """It has processed every event."""
        session = self.session
        if session is not None and session.receipts is not None:
            session.receipts.flush()
        if not self._live or session is None or session.machine.session is None:
            return f"{self.name} has no session"
        self._acknowledged[_hash(session.machine.session)] = session.acknowledged
        cursor, logged = session.machine.cursor, _hash(session.machine.session)
        committed = [one.committed for one in await source.sessions() if one.key.hex() == logged]
        if not committed:
            return f"the log has no session of {self.name}"
        seq = 0 if cursor is None else cursor.seq
        return f"{self.name} has {seq} events, and the log {committed[0]}" if seq != committed[0] else ""

    async def judge(self, source: Source) -> None:
        """Its receipts are an audit's matter; that no message was lost that had been acknowledged is here."""
        await super().judge(source)
        received = {one.key.hex(): one.received for one in await source.sessions()}
        for session, acknowledged in self._acknowledged.items():
            if received.get(session, 0) < acknowledged:
                self._denied(acknowledged, received.get(session, 0))


class StandardClimber(Climber):
    """The client of standard Streamable HTTP, with its standalone stream open."""

    several = True

    def __init__(self, scene: Scene, name: str, seed: int) -> None:
        super().__init__(scene, name, seed)
        self._opened: list[StandardSession] = []

    async def _session(self) -> None:
        async with StandardSession(self.scene.url, self._trace) as session:
            if "result" in await session.ask(INITIALIZE):
                await session.tell(INITIALIZED)
                await session.listen(lasting=True)
                self._opened.append(session)
                session.received = lambda count: self._received(session.ledger)
                await self._climb(session, lambda: bool(session.ended))
            self.scene.ended(self, session.ended)

    def _lost(self, session: Any, account: Account) -> bool:
        stream = session.streams[account.id]
        return stream.cut and stream.last is None

    async def behind(self, source: Source) -> str:
        """Its standalone stream has brought every event."""
        session = self._opened[-1] if self._live else None
        if session is None or session.token is None:
            return f"{self.name} has no session"
        logged = len((await event_ids(source, session.token)).get(0, []))
        given = len(session.standalone.given)
        told = f"{self.name} has {given} events of its standalone stream, and the log {logged}"
        return told if given != logged else ""

    async def judge(self, source: Source) -> None:
        """Each stream, event by event: of a session that goes on it has come whole."""
        await super().judge(source)
        for session in self._opened:
            if session.token is None:
                continue
            logged = await event_ids(source, session.token)
            for stream in (session.standalone, *session.streams.values()):
                number = int(stream.last.split(".")[1]) if stream.last is not None else -1
                due = logged.get(number, [])
                if session.ended:
                    due = due[: max((due.index(id) + 1 for id in stream.given if id in due), default=0)]
                judge_stream(self.scene.trial, f"{self.name}, stream {number}", stream.given, due)


def _hash(token: str) -> str:
    return sha256(token.encode()).hexdigest()
