"""N1: real server processes on one log, which are stopped, killed and told to end (N2, L7, S1, S6)."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from mcp import Client, MCPError

import gapless
from gapless.client.receipts import read_receipts
from gapless.log import database
from gapless.log.base import Owner, Stored
from gapless.log.snapshot import snapshot
from gapless.log.sqlite import SqliteLog
from gapless.protocol.phases import Retry
from gapless.torture.audit import audit
from tests.conftest import Tally
from tests.real.nodes import Balancer, Journal, Node, alive, nodes
from tests.server.harness import PATIENCE, EventStream, Session, note, request, seq_of
from tests.server.restarts import HELLO, key_of

LEASE: Final = 1.5
LONG: Final = 60.0
"""A lease whose end no test waits for."""
BUSY: Final = database._BUSY_MS / 1000
"""Seconds that a commit waits for another process's."""
SLACK: Final = 4.0
"""Seconds that a busy machine may take over what an idle one does at once."""
PAD: Final = 100_000
"""Bytes that fill a pipe soon: what its MCP server does not read is not handed over."""
STEPS: Final = 5
ROUND: Final = 25.0
"""Seconds after which clients that are served get nowhere."""


def call(id: int, run: str, **arguments: Any) -> dict[str, Any]:
    """A request to run something once."""
    return request(id, name="count", arguments={"run": run, **arguments}, _meta={"progressToken": id})


@asynccontextmanager
async def log_of(folder: Path) -> AsyncGenerator[SqliteLog]:
    """The nodes' log, looked at from here."""
    log = SqliteLog(folder / "log.db")
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def stored(log: SqliteLog, session: Session) -> Stored:
    found = await log.load(key_of(session.token))
    assert found is not None
    return found


async def opened(node: Node) -> Session:
    """A session with a handshake, at a node."""
    session = await node.server.open()
    assert (await session.post(1, HELLO)).status == 202
    assert (await session.post(2, note("notifications/initialized"))).status == 202
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0
    stream.drop()
    return session


async def until_answered(stream: EventStream, ids: set[int]) -> dict[int, dict[str, Any]]:
    """The answers to requests; whatever else comes is passed over."""
    answers: dict[int, dict[str, Any]] = {}
    while ids - set(answers):
        message = await stream.message()
        if message.get("id") in ids and "method" not in message:
            assert message["id"] not in answers, "answered twice"
            answers[message["id"]] = message
    return answers


def there(owners: Iterable[Owner]) -> set[str]:
    """Those of the owners' sockets that are there."""
    return {owner.address for owner in owners if Path(owner.address).exists()}


def unknown(answer: dict[str, Any]) -> bool:
    return answer.get("error", {}).get("data") == {"reason": "outcome-unknown"}


# Stopped -------------------------------------------------------------------------------------------


@pytest.mark.rule("N1", "N2", "S6", "L7")
async def test_an_owner_that_stands_still_is_replaced_and_has_nothing_to_say_when_it_goes_on(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal")
    async with nodes(tmp_path, 2, "--lease", str(LEASE)) as (old, new), log_of(tmp_path) as log:
        session = await opened(old)
        bound = await session.bind(session.start)
        await bound.cross()
        # One runs, and while it does nothing is read: what fits into the pipe is handed over, the rest waits.
        for id in range(1, 9):
            message = call(id, f"run-{id}", steps=200 if id == 1 else 0, delay=0.02, pad="x" * PAD)
            assert (await session.post(id + 2, message)).status == 202
        while not journal.lines():
            await session.get("junk")
        before = await stored(log, session)
        waiting = {number - 2 for number in range(before.dispatched + 1, before.received + 1)}
        assert set() < waiting < set(range(1, 9))
        await old.stand_still()
        began = time.monotonic()

        session.server = new.server
        stream = await session.events(session.start)
        served = time.monotonic() - began
        assert LEASE / 2 < served < 2 * LEASE + SLACK
        answers = await until_answered(stream, set(range(1, 9)))
        for id, answer in answers.items():
            assert unknown(answer) == (id not in waiting), answer
        assert (await session.post(11, call(9, "run-9"))).status == 202
        await until_answered(stream, {9})
        settled = await stored(log, session)

        children = {pid for pid, run in journal.lines() if run == "run-1"}
        assert any(map(alive, children)), "of the old one, which cannot end them now"
        old.signal(signal.SIGCONT)
        assert await bound.closed() == 1012
        async with asyncio.timeout(PATIENCE):
            while any(map(alive, children)):
                await new.server.ask("GET", "/mcp")
        assert await stored(log, session) == settled, "it has appended nothing"
        assert max(journal.runs().values()) == 1
        assert all(journal.runs()[f"run-{id}"] == 1 for id in (*waiting, 9))

        session.server = old.server
        assert (await session.post(12, call(10, "run-10"))).json() == {"received": 12}
        await until_answered(stream, {10})
        assert {pid for pid, run in journal.lines() if run == "run-10"}.isdisjoint(children)
        assert (await session.get("junk")).reason == (400, "malformed")


@pytest.mark.rule("N1", "S1", "S6")
async def test_an_owner_that_stands_still_within_a_commit_has_the_others_refuse_until_it_ends(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path, 2, "--lease", str(LEASE)) as (old, new), log_of(tmp_path) as log:
        session = await opened(old)
        await session.post(3, call(1, "run-1", steps=100_000, delay=0.001))
        stream = await session.events(session.start)
        cursor = (await stream.events(5))[-1].id
        await old.stand_still(committing=True)
        kept = await stored(log, session)

        session.server = new.server
        async with httpx2.AsyncClient(trust_env=False, timeout=2 * LEASE + 2 * BUSY + PATIENCE) as http:
            url = f"http://{new.server.host}{session.base}/events"
            refused = await http.get(url, headers={"Last-Event-ID": str(cursor)})
        error = refused.json()["error"]
        assert (refused.status_code, error["data"]["reason"]) == (503, "storage")
        assert error["message"].endswith("cannot be written: database is locked")
        assert await stored(log, session) == kept

        await old.end(signal.SIGKILL)
        resumed = await session.events(cursor)
        answers = await until_answered(resumed, {1})
        assert unknown(answers[1])
        assert (await session.post(4, call(2, "run-2"))).json() == {"received": 4}
        await until_answered(resumed, {2})


# Killed --------------------------------------------------------------------------------------------


@pytest.mark.rule("N1", "N2", "L7", "S1")
async def test_an_owner_that_is_killed_is_replaced_at_once_and_its_client_resumes_through_the_other(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal")
    async with nodes(tmp_path, 2, "--lease", str(LONG)) as (old, new), log_of(tmp_path) as log:
        session = await opened(old)
        session.server = new.server  # which passes on
        stream = await session.events(session.start)
        assert (await stream.message())["id"] == 0
        await session.post(3, call(1, "run-1", steps=1000, delay=0.01))
        events = await stream.events(5)
        assert [json.loads(each.data or b"")["params"]["progress"] for each in events] == [1, 2, 3, 4, 5]
        owners = await log.owners()
        await old.end(signal.SIGKILL)
        assert len(there(owners)) == 2, "who is killed tidies up nothing"
        cursor = str(events[-1].id)
        seen = seq_of(cursor)
        for block in await stream.end():
            if block.id is not None and block.data:
                seen, cursor = seen + 1, block.id
                assert seq_of(block.id) == seen
        began = time.monotonic()
        stream = await session.events(cursor)
        assert time.monotonic() - began < LONG / 4
        events = [await stream.event()]
        while not unknown(json.loads(events[-1].data or b"")):
            events.append(await stream.event())
        assert [seq_of(each.id) for each in events] == list(range(seen + 1, seen + 1 + len(events)))
        await session.post(4, call(2, "run-2"))
        await until_answered(stream, {2})
        assert journal.runs() == {"run-1": 1, "run-2": 1}
        (left,) = await log.owners()
        assert there(owners) == {left.address}


# Told to end ---------------------------------------------------------------------------------------


@pytest.mark.rule("N1", "N2")
async def test_a_server_that_is_told_to_end_leaves_neither_owner_nor_socket_and_nobody_waits(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path, 2, "--lease", str(LONG)) as (old, new), log_of(tmp_path) as log:
        session = await opened(old)
        bound = await session.bind(session.start)
        cursor = str((await bound.cross())[-1].id)
        owners = await log.owners()
        assert len(there(owners)) == 2
        await old.end(signal.SIGTERM)
        assert await bound.closed() == 1012
        session.server = new.server
        stream = await session.events(cursor)
        assert seq_of((await stream.event()).id) == seq_of(cursor) + 1
        (left,) = await log.owners()
        assert there(owners) == {left.address}
        await new.end(signal.SIGTERM)
        assert await log.owners() == ()
        assert there(owners) == set()


# All of it, again and again ------------------------------------------------------------------------


class Caller:
    """A client of ours that calls and calls, one at a time, and knows what it was told of each."""

    def __init__(self, name: str, url: str, folder: Path, upgrade: Any) -> None:
        self.receipts = folder / f"{name}.receipts"
        self.told: dict[str, str | None] = {}
        self.over = False
        self.moved = asyncio.Event()
        self._name = name
        self._connection = gapless.connect(
            url,
            upgrade=upgrade,
            receipts=self.receipts,
            answer_timeout=3 * LEASE,
            retry=Retry(first=0.02, most=0.2, attempts=1000, door_first=0.05, door_most=0.2),
        )

    async def run(self) -> None:
        """Call until it is over."""
        async with Client(self._connection, mode="legacy") as client:
            while not self.over:
                run = f"{self._name}-{len(self.told)}"
                self.told[run] = None
                self.moved.set()
                steps: list[float] = []

                async def progressed(
                    progress: float, total: float | None, message: str | None, steps: list[float] = steps
                ) -> None:
                    steps.append(progress)

                try:
                    arguments = {"run": run, "steps": STEPS, "delay": 0.02}
                    result = await client.call_tool("count", arguments, progress_callback=progressed)
                except MCPError as error:
                    self.told[run] = (error.error.data or {}).get("reason")
                else:
                    self.told[run] = getattr(result.content[0], "text", "")
                    assert steps == list(range(1, STEPS + 1)), run

    async def until(self, calls: int) -> None:
        """Wait until it has begun so many calls."""
        while len(self.told) < calls:
            self.moved.clear()
            await self.moved.wait()


Strike = tuple[int, float | None]
"""Which server is struck: it stands still for so many seconds, or (`None`) is killed and started again."""


async def strike(node: Node, still: float | None) -> None:
    """Do it to a server."""
    if still is None:
        await node.end(signal.SIGKILL)
        await node.start()
    else:
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(still)
        node.signal(signal.SIGCONT)


def strikes(rng: random.Random, rounds: int, servers: int) -> Iterator[list[Strike]]:
    """Rounds in which all servers but one are struck at most, some for less than a lease."""
    for _ in range(rounds):
        struck = rng.sample(range(servers), rng.randint(1, servers - 1))
        yield [(n, None if rng.random() < 0.5 else rng.uniform(0.2, 2.5 * LEASE)) for n in struck]


async def fight(
    folder: Path, rng: random.Random, servers: int, rounds: Iterable[list[Strike]]
) -> Counter[str]:
    """Servers are struck round by round, whatever their clients do; whether anybody had to suffer for it.

    No run was begun twice, every result is of a run that was begun, and no event was lost.
    """
    options = ("--lease", str(LEASE), "--keepalive", "0.5", "--probe-timeout", "0.5")
    async with nodes(folder, servers, *options) as fighting, log_of(folder) as log:
        balancer = Balancer(fighting, rng)
        url = await balancer.start()
        callers = [
            Caller(f"{n}", url, folder, upgrade) for n, upgrade in enumerate(("auto", "never", "auto"))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller.run())
                await asyncio.gather(*(caller.until(1) for caller in callers))
                for struck in rounds:
                    async with asyncio.timeout(ROUND):
                        await asyncio.gather(*(strike(fighting[n], still) for n, still in struck))
                        await asyncio.gather(*(caller.until(len(caller.told) + 2) for caller in callers))
                for caller in callers:
                    caller.over = True
        finally:
            await balancer.close()
        takeovers = sum(session.fence for session in await log.sessions())
    runs = Journal(folder / "journal").runs()
    assert max(runs.values()) == 1, runs.most_common(3)
    told = {run: how for caller in callers for run, how in caller.told.items()}
    for run, how in told.items():
        assert how in (run, "outcome-unknown")
        assert how != run or runs[run] == 1, run
    for caller in callers:
        with caller.receipts.open("rb") as file, snapshot(folder / "log.db") as logged:
            reports = await audit(logged, read_receipts(file, caller.receipts.stat().st_size))
        assert [finding.text for report in reports for finding in report.violations] == []
        (report,) = [report for report in reports if report.processed is not None]
        assert report.processed is not None
        assert report.processed > STEPS * sum(how == run for run, how in caller.told.items())
    assert takeovers > 0, "nobody had anything to fight for"
    unknown = sum(how == "outcome-unknown" for how in told.values())
    return Counter({"calls": len(told), "outcome-unknown": unknown, "takeovers": takeovers})


@pytest.mark.rule("N1", "N2", "S1", "S6")
async def test_no_run_is_run_twice_and_no_event_is_lost_whoever_owns_the_sessions(tmp_path: Path) -> None:
    """Wherever they are: the one server is killed, then the other stands still for longer than a lease."""
    await fight(tmp_path, random.Random(1), 2, [[(0, None)], [(1, 2 * LEASE)]])


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.rule("N1", "N2", "S1", "S5", "S6")
@pytest.mark.parametrize("servers", [2, 3])
async def test_forty_rounds_of_it(tmp_path: Path, servers: int, tally: Tally) -> None:
    rng = random.Random(f"ownership {servers}")
    tally(await fight(tmp_path, rng, servers, strikes(rng, 40, servers)), f"{servers} servers")
