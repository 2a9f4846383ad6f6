"""A crowd on one real server: 5,000 sessions that idle, 2,000 that live; `make crowd`.

An SDK server in the process of `gapless serve`, its log on the disk. What a session costs is measured.
Then all connections are cut, and all clients come back at once with their cursors, half of them through the
door; then the process is killed, another starts on its log, and they all come back to that.

    python -m tests.soak.crowd
    python -m tests.soak.crowd --idle 500 --live 200 --json

Exit status 1 if anybody was refused, or an event or a call was lost. Needs /proc, and for so many sessions
a limit of 10,000 descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from gapless.cli.loop import loop_factory
from gapless.cli.target import serving
from gapless.torture.judge import judge_outcome, judge_rest
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Account, Climb, Kind
from gapless.torture.mortal import Journal
from gapless.torture.trial import Trial
from tests.soak.raw import Member, Refused, Requests
from tests.soak.sampling import busy, resident

__all__ = ["main"]

_progress: Final = Console(stderr=True, highlight=False)

_SERVER: Final = "examples.ladder_server:server"
_AT_ONCE: Final = 16
"""Plain requests at a time."""
_RUNGS: Final = 6
_DELAY: Final = 5.0
"""Seconds between two events of a session that lives; more where a machine is so busy that all of a climb
would be over before the last session has begun it."""
_ENDLESS: Final = 1000
"""Rungs of a climb that nobody sees the end of."""
_MIDDLE: Final = 8.0
"""Seconds into the climbs at which it happens."""
_MOST: Final = 120.0


@dataclass(slots=True)
class Crowd:
    """What came of it.

    Attributes:
        figures: times in seconds, memory in bytes.
        wrong: in words.
    """

    figures: dict[str, float] = field(default_factory=dict[str, float])
    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def note(self, name: str, value: float, words: str) -> None:
        """A figure."""
        self.figures[name] = value
        _progress.print(f"{name}: {words}")


class _Run:
    """One run: its members, whose climbs are judged as they end.

    Attributes:
        delay: between two rungs of a climb.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.crowd = Crowd()
        self.trial = Trial("crowd", 0, ())
        self.live: list[Member] = []
        self.journal = Journal(folder / "journal")
        self._requests = Requests(url, _AT_ONCE)
        self._members = 0
        self._climbs = 0
        self.delay = _DELAY

    async def open(self, count: int) -> list[Member]:
        """So many sessions more, initialized."""
        first, self._members = self._members, self._members + count
        members = [Member(self._requests, number) for number in range(first, self._members)]
        await _all(member.open(INITIALIZE, INITIALIZED) for member in members)
        return members

    async def climb(self, rungs: int, delay: float) -> list[Account]:
        """All who live begin a climb."""
        self._climbs += 1
        run, id = secrets.token_hex(4), self._climbs
        return await _all(
            member.climb(Climb(f"{run}-{number}", rungs, delay, (Kind.LOG,)), id)
            for number, member in enumerate(self.live)
        )

    async def answered(self, accounts: Sequence[Account], what: str) -> None:
        """Wait until all climbs are answered, and judge them."""
        changed = asyncio.Event()
        for member in self.live:
            member.changed = changed.set
        try:
            async with asyncio.timeout(_MOST + _RUNGS * self.delay):
                while not all(
                    account.result is not None or member.wrong
                    for account, member in zip(accounts, self.live, strict=True)
                ):
                    changed.clear()
                    await changed.wait()
                    await asyncio.sleep(0.2)  # or each of thousands of events has all of them looked at
        except TimeoutError:
            pass
        runs = self.journal.runs() or Counter[str]()
        for account in accounts:
            judge_outcome(self.trial, account, runs[account.climb.run])
            judge_rest(self.trial, account, runs[account.climb.run])
        came = sum(len(account.rungs) for account in accounts)
        self.crowd.counts[f"events, {what}"] = came

    def busy(self, accounts: Sequence[Account], when: str) -> None:
        """Nothing is shown by a cut between two calls: most have one open, or that is wrong."""
        calls = sum(account.result is None for account in accounts)
        self.crowd.counts[f"calls open {when}"] = calls
        if 2 * calls < len(accounts):
            self.crowd.wrong.append(f"only {calls} calls of {len(accounts)} are open {when}")

    def cut(self) -> None:
        """Every connection there is."""
        for member in self.live:
            member.cut()

    async def back(self, what: str, pid: int, sockets: int) -> None:
        """All come back at once, every second one through the door; until they all are."""
        began, worked = time.monotonic(), busy(pid)
        for number, member in enumerate(self.live):
            member.listen(socket=number % 2 == sockets)
        await asyncio.gather(*(member.back.wait() for member in self.live))
        seconds = time.monotonic() - began
        refused = sum(bool(member.wrong) for member in self.live)
        told = f"{seconds:.1f} s until all {len(self.live):,} are back, {refused} refused"
        self.crowd.note(f"back {what}", seconds, f"{told}; {busy(pid) - worked:.1f} s of a processor")

    async def close(self) -> Crowd:
        """All go; what came of it."""
        self.cut()
        await self._requests.close()
        for member in self.live:
            self.crowd.wrong += member.wrong
            self.crowd.counts.update(f"{what} that the server ended" for what in member.ended)
        self.crowd.wrong += [f"{f.violation.value}: {f.detail}" for f in self.trial.findings]
        self.crowd.counts.update(self.trial.counts)
        return self.crowd


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


async def _crowd(idle: int, live: int, folder: Path) -> Crowd:
    port = _free_port()
    words = ("--port", str(port), "--log", f"sqlite:///{folder / 'crowd.db'}", _SERVER)
    environment = {"LADDER_JOURNAL": str(folder / "journal")}
    async with serving(words, **environment) as (url, pid):
        run = _Run(url, folder)
        accounts = await _measure(run, pid, idle, live)
        run.crowd.note("memory", resident(pid), f"{resident(pid) / 2**20:.0f} MiB")
        run.busy(accounts, "at the cut")
        run.cut()
        await run.back("after the cut", pid, 1)
        await run.answered(accounts, "across the cut")
        accounts = await run.climb(_ENDLESS, run.delay)
        await asyncio.sleep(_MIDDLE)
        run.busy(accounts, "at the kill")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        run.cut()
    async with serving(words, **environment) as (url, pid):
        run.crowd.note("restart", time.monotonic() - killed, f"{time.monotonic() - killed:.1f} s")
        await run.back("after the kill", pid, 0)
        await run.answered(accounts, "across the kill")
        await run.answered(await run.climb(2, 1.0), "afterwards")
        return await run.close()


async def _measure(run: _Run, pid: int, idle: int, live: int) -> list[Account]:
    """Open them all, and see what each costs; those who live are in the middle of a climb then."""
    run.live = await run.open(1)
    run.live[0].listen(socket=False)
    await run.answered(await run.climb(1, 0.0), "alone")
    before, began = resident(pid), time.monotonic()
    await run.open(idle)
    cost = (resident(pid) - before) / idle
    seconds = time.monotonic() - began
    run.crowd.note("idle", cost, f"{idle:,} sessions in {seconds:.0f} s, {cost / 1024:.1f} KiB each")
    before, began = resident(pid), time.monotonic()
    for member in await run.open(live - 1):
        member.listen(socket=False)
        run.live.append(member)
    await asyncio.gather(*(member.back.wait() for member in run.live))
    seconds = time.monotonic() - began
    run.delay = max(_DELAY, seconds / _RUNGS)
    accounts = await run.climb(_RUNGS, run.delay)
    await asyncio.sleep(_MIDDLE)
    cost = (resident(pid) - before) / (live - 1)
    run.crowd.note("live", cost, f"{live:,} sessions in {seconds:.0f} s, {cost / 1024:.1f} KiB each")
    return accounts


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _allow(descriptors: int) -> None:
    held, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if held < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, hard), hard))


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if nobody was refused and nothing was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--idle", type=int, default=5000, help="sessions that nobody is connected to")
    parser.add_argument("--live", type=int, default=2000, help="sessions with a connection and a call")
    parser.add_argument("--json", action="store_true", help="print everything, for programs")
    options = parser.parse_args(arguments)
    _allow(2 * options.live + 1000)
    with tempfile.TemporaryDirectory(prefix="gapless-crowd-") as folder:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                crowd = runner.run(_crowd(options.idle, options.live, Path(folder)))
            except* Refused as refused:
                crowd = Crowd(wrong=[str(error) for error in refused.exceptions])
    if options.json:
        print(json.dumps(asdict(crowd), indent=2))
    else:
        print(", ".join(f"{count:,} {what}" for what, count in sorted(crowd.counts.items())))
        for wrong, times in Counter(crowd.wrong).most_common(20):
            print(f"wrong, {times} times: {wrong}")
    return int(bool(crowd.wrong))


if __name__ == "__main__":
    sys.exit(main())
