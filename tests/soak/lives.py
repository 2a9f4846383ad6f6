"""What clients do to a server all day: each life is one session, or a few, and says what it found wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from gapless.errors import TargetError
from gapless.torture.door import DoorSession
from gapless.torture.experiments.storm import Storm
from gapless.torture.judge import judge, judge_door
from gapless.torture.ladder import Account, Climb, Kind
from gapless.torture.ours import OurSession
from gapless.torture.saboteur import Saboteur, sabotage
from gapless.torture.schedule import AT_ONCE, Fault
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Target, Trial, Violation
from gapless.torture.trials import run_trial

__all__ = ["EXPIRY", "LIVES", "OPTIONS", "RESIDENTS", "TOMBSTONE", "World"]

EXPIRY: Final = 6.0
TOMBSTONE: Final = 6.0
_EVENTS: Final = 300
OPTIONS: Final = (
    *("--session-expiry", str(EXPIRY), "--tombstone", str(TOMBSTONE)),
    *("--retain-events", str(_EVENTS), "--retain-bytes", str(4 * 2**20), "--retain-seconds", "20"),
    *("--keepalive", "0.5", "--probe-timeout", "0.5", "--upgrade-window", "5", "--ack-window", "5"),
    *("--header-timeout", "3", "--body-timeout", "3", "--max-message-bytes", str(256 * 1024)),
)
"""Of `gapless serve`: what is done away with is done away with soon."""

_LATE: Final = 8.0
"""Seconds after its time by which a session has expired: the server looks every 1.5 s, on a busy machine."""
_MOST: Final = 45.0
"""Seconds that a climb may take, faults and all."""
_NO_QUESTIONS: Final = tuple(kind for kind in Kind if kind is not Kind.ASK)
_CUTS: Final = (*AT_ONCE, Fault.CUT_ALL, Fault.OUTAGE, Fault.HALF_OPEN)


@dataclass(slots=True)
class World:
    """A server, and what is known of the lives before it.

    Attributes:
        over: no more calls are to be made.
        dead: sessions that have expired, and since when.
    """

    target: Target
    rng: random.Random
    over: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    violations: Counter[str] = field(default_factory=Counter[str])
    findings: list[str] = field(default_factory=list[str])
    dead: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def add(self, trial: Trial) -> None:
        """Count what came of a life."""
        self.counts.update(trial.counts)
        for finding in trial.findings:
            self.violations[finding.violation.value] += finding.amount
            self.findings.append(f"{trial.experiment}: {finding.violation.value}: {finding.detail}")
        del self.findings[50:]

    async def live(self, name: str) -> None:
        """One life, and what came of it."""
        trial = Trial(name, self.rng.getrandbits(32), ())
        lasting = name in RESIDENTS
        try:
            async with asyncio.timeout(None if lasting else 4 * _MOST):
                await (RESIDENTS if lasting else LIVES)[name](self, trial)
        except (TargetError, httpx2.HTTPError, TimeoutError) as error:
            trial.find(Violation.STUCK, str(error) or type(error).__name__)
        trial.counts[f"lives: {name}"] += 1
        self.add(trial)

    def climb(self, trial: Trial, kinds: tuple[Kind, ...] = tuple(Kind), most: int = 60) -> Climb:
        """Some climb or other."""
        rng = self.rng
        of = tuple(rng.sample(kinds, rng.randint(1, len(kinds))))
        trial.counts["climbs"] += 1
        run = f"{trial.run}-{trial.counts['climbs']}"
        return Climb(
            run, rng.choice((1, 5, 20, most)), rng.choice((0.0, 0.005)), of, rng.choice((0, 0, 2000))
        )


# Lives that end ---------------------------------------------------------------------------------------


async def _storm(world: World, trial: Trial) -> None:
    """Everything at random, as `gapless torture` has it: cut, resumed, upgraded, downgraded; then deleted."""
    storm = await run_trial(Storm(), world.target, trial.seed)
    trial.findings += storm.findings
    trial.counts.update(storm.counts)


async def _to_and_fro(world: World, trial: Trial) -> None:
    """Some events over SSE, some over a WebSocket, and over SSE again, until the climb is over."""
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        climb = world.climb(trial, _NO_QUESTIONS)
        account = session.ledger.start(climb, 1)
        await session.post(climb.request(1))
        for _ in range(climb.rungs + 20):
            if account.complete:
                break
            await _stream(session, account, world.rng.randint(1, 8))
            await _socket(session, account, world.rng.randint(1, 8), trial)
        judge_door(trial, session, account)


async def _stream(session: DoorSession, account: Account, most: int) -> None:
    """So many events of an event stream, unless it is refused: the socket before it may look alive still."""
    with suppress(httpx2.HTTPError, TimeoutError):
        async with session.events() as answer:
            if answer.streams:
                await _read(session, answer.blocks(), account, most)
            else:
                await answer.body()


async def _read(session: DoorSession, blocks: AsyncGenerator[Any], account: Account, most: int) -> None:
    with suppress(TimeoutError):  # what did not come is missing when it is judged
        async with asyncio.timeout(_MOST), aclosing(blocks):
            async for block in blocks:
                most -= session.take(block)
                if most <= 0 or account.complete:
                    return


async def _socket(session: DoorSession, account: Account, most: int, trial: Trial) -> None:
    knocked = await session.knock(session.cursor)
    trial.counts[f"handshakes: {knocked.status} {knocked.reason}".rstrip()] += 1
    if knocked.frames is None:
        return
    while most > 0 and not account.complete and (block := await knocked.frames.next()) is not None:
        took = session.take(block)
        most -= took
        if took or block.event == "resume-cursor":
            await knocked.frames.ack(session.cursor)
    knocked.frames.drop()


async def _left(world: World, trial: Trial) -> None:
    """Used, and left; it expires, and for a while it is told why."""
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        await _climbed(world, trial, session)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(EXPIRY + _LATE / 2)
        status, body = await session.request("POST", "ack", {"cursor": session.cursor})
        reason = body.get("error", {}).get("data", {}).get("reason")
        if (status, reason) not in ((404, "session-expired"), (404, "session-unknown")):
            trial.find(Violation.STUCK, f"it should have expired: it is answered {status} {reason}")
        trial.counts["expired"] += 1
        world.dead.append((loop.time(), session.token))
        del world.dead[:-100]
        session.token = ""  # nothing to delete


async def _climbed(world: World, trial: Trial, session: DoorSession) -> None:
    """A whole climb over one event stream."""
    climb = world.climb(trial, _NO_QUESTIONS)
    account = session.ledger.start(climb, 1)
    async with session.events() as answer:
        if not answer.streams:
            trial.find(Violation.FORCED, f"the event stream is answered {answer.status}")
            return
        await session.post(climb.request(1))
        await _read(session, answer.blocks(), account, climb.rungs + 10)
    judge_door(trial, session, account)


async def _crashed(world: World, trial: Trial) -> None:
    """A client that dies in the middle of a call, with a question to it open, and never comes back."""
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        climb = Climb(trial.run, 20, 0.01, (Kind.LOG, Kind.ASK))
        account = session.ledger.start(climb, 1)
        await session.post(climb.request(1))
        if world.rng.random() < 0.5:
            await _socket(session, account, 2, trial)
        else:
            await _stream(session, account, 2)
        session.token = ""


async def _stopped(world: World, trial: Trial) -> None:
    """A reader that asks for much and reads nothing of it; the server is rid of it in the end."""
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        climb = Climb(trial.run, 100, 0.0, (Kind.LOG,), 32 * 1024)
        if world.rng.random() < 0.5:
            await session.knock(session.cursor)
            await session.post(climb.request(1))
            await asyncio.sleep(2.0)
        else:
            async with session.events():
                await session.post(climb.request(1))
                await asyncio.sleep(2.0)
        if world.rng.random() < 0.5:
            session.token = ""


async def _stale(world: World, trial: Trial) -> None:
    """A client that comes back with a cursor that is evicted is told so."""
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        first = session.cursor
        for id in (1, 2):
            climb = Climb(f"{trial.run}-{id}", _EVENTS, 0.001, (Kind.LOG,))
            account = session.ledger.start(climb, id)
            async with session.events() as answer:
                await session.post(climb.request(id))
                await _read(session, answer.blocks(), account, climb.rungs + 10)
            judge_door(trial, session, account)
            await session.request("POST", "ack", {"cursor": session.cursor})
        async with session.events(first) as answer:
            if answer.status != 409:
                trial.find(Violation.SILENT_CURSOR, f"an evicted cursor is answered {answer.status}")
            trial.counts["evicted cursors"] += 1


_WRONG: Final[tuple[tuple[int, str, str, Any, dict[str, str]], ...]] = (
    (400, "POST", "messages", {"jsonrpc": "2.0", "method": "x"}, {}),
    (409, "POST", "messages", {"jsonrpc": "2.0", "method": "x"}, {"Mcp_Message_Number": "9"}),
    (400, "POST", "messages", {"jsonrpc": "2.0", "method": "x"}, {"Mcp_Message_Number": "-1"}),
    (415, "POST", "messages", {}, {"Content_Type": "text/plain"}),
    (413, "POST", "messages", "x" * 400_000, {"Mcp_Message_Number": "3"}),
    (405, "PUT", "messages", None, {}),
    (400, "GET", "events", None, {"Accept": "text/event-stream", "Last_Event_ID": "junk"}),
    (409, "GET", "events", None, {"Accept": "text/event-stream", "Last_Event_ID": f"1.0.{'0' * 16}"}),
    (409, "GET", "events", None, {"Accept": "text/event-stream", "Last_Event_ID": f"99.0.{'0' * 16}"}),
    (406, "GET", "events", None, {"Accept": "image/png"}),
    (400, "POST", "ack", {"cursor": "junk"}, {}),
    (400, "POST", "ack", "junk", {}),
    (400, "POST", "upgrade", {"cursor": "junk", "protocol": "mcp.v1", "negotiation": "n"}, {}),
    (421, "POST", "messages", {}, {"Host": "elsewhere.example"}),
    (403, "POST", "messages", {}, {"Origin": "https://elsewhere.example"}),
)
"""The status that is due, and a request of a session that has received two messages, and one event."""


_JUNK: Final = (b"\x16\x03\x01\x02\x00\x01", b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Le", b"")
"""What is no request, and what never becomes one."""


async def _wrong(world: World, trial: Trial) -> None:
    """Requests that are refused, each for its own reason; the session takes no harm."""
    await asyncio.gather(*(_raw(world.target, junk) for junk in _JUNK))
    trial.counts["wrong requests"] += len(_JUNK)
    async with DoorSession(world.target.url, trial.trace) as session:
        await session.open()
        for due, method, part, body, headers in _WRONG:
            status, _ = await session.request(method, part, body, **headers)
            if status != due:
                trial.find(Violation.DENIED, f"{method} {part} {body!s:.40} {headers}: {status}, not {due}")
            trial.counts["wrong requests"] += 1
        for cursor, ticket in (("junk", None), (session.cursor, "junk"), (f"99.0.{'0' * 16}", None)):
            knocked = await session.knock(cursor, ticket)
            if not 400 <= knocked.status < 500:
                trial.find(Violation.DENIED, f"a handshake with {cursor}, {ticket}: {knocked.status}")
            trial.counts["wrong requests"] += 1
        await _climbed(world, trial, session)


async def _raw(target: Target, data: bytes) -> None:
    """Say something, and wait until the server has had enough of that."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    with suppress(OSError):
        writer.write(data)
        async with asyncio.timeout(_MOST):
            await reader.read()
    writer.transport.abort()


LIVES: Final[dict[str, Callable[[World, Trial], Awaitable[None]]]] = {
    "storm": _storm,
    "to and fro": _to_and_fro,
    "left to expire": _left,
    "crashed": _crashed,
    "stopped reading": _stopped,
    "stale": _stale,
    "wrong": _wrong,
}


# Lives that go on -------------------------------------------------------------------------------------


@asynccontextmanager
async def _troubled(
    world: World, trial: Trial, faults: tuple[Fault, ...]
) -> AsyncGenerator[tuple[str, Saboteur]]:
    """The server through a proxy that does it some harm every other second."""

    async def trouble() -> None:
        while True:
            await asyncio.sleep(world.rng.uniform(0.5, 4.0))
            if trial.counts["calls of residents"]:  # not before it lives there
                saboteur.strike(world.rng.choice(faults))
                trial.counts["cuts of residents"] += 1

    async with sabotage(world.target, (), trial.trace) as (url, saboteur):
        task = asyncio.create_task(trouble())
        try:
            yield url, saboteur
        finally:
            task.cancel()


async def _our_resident(world: World, trial: Trial) -> None:
    """One session of our client for the whole run: through the door and back, call after call."""
    faults = (*_CUTS, Fault.MOVE, Fault.MOVE, Fault.MOVE)
    async with _troubled(world, trial, faults) as (url, saboteur):
        async with OurSession(url, trial.trace, policy="auto") as session:
            await session.open()
            saboteur.moved = session.move
            while not world.over and session.error is None:
                trial.counts["calls of residents"] += 1
                account = await session.start(world.climb(trial), trial.counts["calls of residents"])
                await session.until(lambda account=account: account.complete, _MOST)
                judge(trial, account)
                session.ledger.accounts.clear()
                await asyncio.sleep(world.rng.uniform(0.1, 0.5))
            if session.error is not None:
                trial.find(Violation.FORCED, f"a resident's session ended: {session.error}")
            trial.counts["through the door"] += session.bound


async def _standard_resident(world: World, trial: Trial) -> None:
    """The same as standard clients have it, with each call on a stream of its own."""
    async with _troubled(world, trial, (Fault.RESET, Fault.CLOSE)) as (url, _):
        async with StandardSession(url, trial.trace) as session:
            await session.open()
            while not world.over and not session.ended:
                trial.counts["calls of residents"] += 1
                lost = session.unresumable
                kinds = (Kind.PROGRESS, Kind.LOG, Kind.ASK)
                account = session.start(world.climb(trial, kinds), trial.counts["calls of residents"])
                # Of a call that is cut before anything came nothing will: to wait would be to let it expire.
                await session.until(
                    lambda account=account, lost=lost: account.complete or session.unresumable > lost, _MOST
                )
                judge(trial, account, excused=session.unresumable > lost)
                trial.counts["unresumable"] += session.unresumable - lost
                session.ledger.accounts.clear()
                await asyncio.sleep(world.rng.uniform(0.1, 0.5))
            if session.ended:
                trial.find(Violation.FORCED, f"a resident's session ended: {session.ended}")


RESIDENTS: Final[dict[str, Callable[[World, Trial], Awaitable[None]]]] = {
    "our resident": _our_resident,
    "standard resident": _standard_resident,
}
