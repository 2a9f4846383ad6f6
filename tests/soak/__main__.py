"""Mixed life on real servers, for an hour or so: `make soak`.

One `gapless serve` has an MCP server of the SDK in its process, the other a stdio server for each session;
both keep a log on the disk. Sessions are opened, used, cut, resumed, upgraded, downgraded, deleted, left to
expire, abandoned by clients that crash and by readers that stop, and asked what is wrong. Meanwhile their
processes are looked at once a second.

    python -m tests.soak --seconds 180
    python -m tests.soak --json > soak.json

Exit status 1 if an event or a call was lost, if anything grew, or if something was left when all had gone.
Needs /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sqlite3
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
from rich.console import Console
from rich.table import Table

from gapless.cli.target import serving
from gapless.torture.door import DoorSession
from gapless.torture.trial import Target, Trace
from tests.soak.judge import BOUNDS, grown, judge_growth, judge_rest
from tests.soak.lives import EXPIRY, LIVES, OPTIONS, RESIDENTS, TOMBSTONE, World
from tests.soak.sampling import Sampler

__all__ = ["main"]

_progress: Final = Console(stderr=True, highlight=False, width=200)

_HALVES: Final = {
    "in process": ("examples.ladder_server:server",),
    "stdio": ("--", sys.executable, "-m", "tests.soak.child"),
}
_LIVES_AT_ONCE: Final = {"in process": 5, "stdio": 4}
_WEIGHTS: Final = {"storm": 8, "to and fro": 3}
_SWEEP: Final = 60.0
"""Seconds between two looks of a server at the graves in its log."""
_FILL: Final = 6
"""Readers that stop, with 3 MiB each, that make the log's cache of 16 MiB overflow."""
_TOLD: Final = 30.0
"""Seconds between two lines of progress."""
_RESTING: Final = 40.0
"""Seconds that a server has to be rid of everything once nobody is there."""


@dataclass(slots=True)
class Half:
    """What came of one of the servers.

    Attributes:
        wrong: in words.
        series: of each thing that was watched: its level, the most of it, by how much it grew.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    violations: dict[str, int] = field(default_factory=dict[str, int])
    wrong: list[str] = field(default_factory=list[str])
    series: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    rest: dict[str, float] = field(default_factory=dict[str, float])


async def _half(name: str, seconds: float, seed: str, folder: Path) -> Half:
    """Serve, live, and judge."""
    log = folder / "soak.db"
    words = ("--log", f"sqlite:///{log}", *OPTIONS, *_HALVES[name])
    async with serving(words, LADDER_JOURNAL=str(folder / "journal")) as (url, pid):
        world = World(Target(url, pid), random.Random(f"{seed} {name}"))
        sampler, half = Sampler(url, pid, log), Half()
        try:
            await _watched(name, world, sampler, half, seconds)
        except (httpx2.HTTPError, OSError, sqlite3.Error, ValueError) as error:
            half.wrong.append(f"the server cannot be looked at: {type(error).__name__}: {error}")
        half.wrong += world.findings
        half.counts |= sorted(world.counts.items())
        half.violations |= world.violations
        await sampler.close()
        return half


async def _watched(name: str, world: World, sampler: Sampler, half: Half, seconds: float) -> None:
    await sampler.look()
    before = await sampler.look()
    await _warm(world)
    looking = [asyncio.create_task(one) for one in (sampler.run(), _tell(name, world, sampler))]
    try:
        await _live(world, seconds, _LIVES_AT_ONCE[name])
    finally:
        for task in looking:
            task.cancel()
        await asyncio.wait(looking)
    for task in looking:
        if not task.cancelled():
            task.result()  # it should not have ended
    half.rest = await _rest(sampler, before)
    half.series = {of: asdict(grown(samples, BOUNDS[of].at)) for of, samples in sampler.series.items()}
    half.wrong += judge_growth(sampler.series) + judge_rest(before, half.rest)
    half.wrong += await _graves(world, half)


async def _tell(name: str, world: World, sampler: Sampler) -> None:
    while True:
        await asyncio.sleep(_TOLD)
        now = {of: samples[-1] for of, samples in sampler.series.items()}
        seen = ", ".join(f"{of} {value:,.0f}" for of, (_, value) in now.items())
        at = max(at for at, _ in now.values())
        lives = sum(count for what, count in world.counts.items() if what.startswith("lives: "))
        _progress.print(f"{at:5.0f} s {name}: {lives} lives, {len(world.findings)} wrong; {seen}")


async def _warm(world: World) -> None:
    """All that may happen has happened once, and what caches has had its fill."""
    async with asyncio.TaskGroup() as group:
        for name in (*LIVES, *["stopped reading"] * _FILL):
            group.create_task(world.live(name))


async def _live(world: World, seconds: float, at_once: int) -> None:
    """Life after life, beside those that go on for as long."""
    until = asyncio.get_running_loop().time() + seconds
    names = [name for name in LIVES for _ in range(_WEIGHTS.get(name, 1))]

    async def lives() -> None:
        while asyncio.get_running_loop().time() < until:
            await world.live(world.rng.choice(names))

    async def clock() -> None:
        await asyncio.sleep(seconds)
        world.over = True

    async with asyncio.TaskGroup() as group:
        group.create_task(clock())
        for name in RESIDENTS:
            group.create_task(world.live(name))
        for _ in range(at_once):
            group.create_task(lives())


async def _rest(sampler: Sampler, before: dict[str, float]) -> dict[str, float]:
    """What there is once nobody is there: as soon as nothing is left that should not be, or in the end."""
    until = asyncio.get_running_loop().time() + _RESTING
    while True:
        now = await sampler.look()
        if not judge_rest(before, now) or asyncio.get_running_loop().time() > until:
            return now
        await asyncio.sleep(1.0)


async def _graves(world: World, half: Half) -> list[str]:
    """Sessions that died long ago are not known any more: their graves are levelled."""
    now = asyncio.get_running_loop().time()
    old = [token for since, token in world.dead if now - since > TOMBSTONE + _SWEEP + EXPIRY]
    known: list[str] = []
    async with DoorSession(world.target.url, Trace()) as session:
        for token in old:
            session.token = token
            status, body = await session.request("POST", "ack", {"cursor": "0"})
            reason = body.get("error", {}).get("data", {}).get("reason")
            if (status, reason) != (404, "session-unknown"):
                known.append(f"a session that expired long ago is answered {status} {reason}")
        session.token = ""
    half.counts["graves that are gone"] = len(old) - len(known)
    return known


async def _soak(seconds: float, seed: str) -> dict[str, Half]:
    with tempfile.TemporaryDirectory(prefix="gapless-soak-") as folder:
        folders = [Path(folder) / str(n) for n in range(len(_HALVES))]
        for each in folders:
            each.mkdir()
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(_half(name, seconds, seed, each))
                for name, each in zip(_HALVES, folders, strict=True)
            }
        return {name: task.result() for name, task in tasks.items()}


def _show(halves: dict[str, Half]) -> None:
    console = Console(highlight=False)
    for name, half in halves.items():
        table = Table("", "level", "most", "grown", "at rest", title=name)
        for of, found in half.series.items():
            table.add_row(
                of, *(f"{found[key]:,.0f}" for key in ("level", "most", "grown")), f"{half.rest[of]:,.0f}"
            )
        console.print(table)
        console.print(", ".join(f"{count:,} {what}" for what, count in half.counts.items()))
        for wrong in half.wrong:
            console.print(f"[red]{name}: {wrong}", markup=True)


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if nothing was lost, and nothing grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long they live")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of what they do, by and large")
    parser.add_argument("--json", action="store_true", help="print everything, for programs")
    options = parser.parse_args(arguments)
    if options.seconds < 60:
        parser.error("in less than a minute nothing can be said to grow")
    halves = asyncio.run(_soak(options.seconds, options.seed))
    if options.json:
        found: dict[str, Any] = {"seconds": options.seconds, "seed": options.seed}
        print(json.dumps({**found, **{name: asdict(half) for name, half in halves.items()}}, indent=2))
    else:
        _show(halves)
    return int(any(half.wrong for half in halves.values()))


if __name__ == "__main__":
    sys.exit(main())
