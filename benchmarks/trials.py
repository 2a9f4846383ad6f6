"""Sessions with random cuts at random times on real sockets, both ways through the door: `make trials`.

Each trial is one session of the official SDK's client, through our transport and a fault proxy of
its own, to one `gapless serve`. It makes one call that reports numbered progress, while its
connections are cut by a plan drawn from the trial's number, so that a failed trial can be repeated:

    python benchmarks/trials.py --only 17 --sessions 1

Exit status 1 if any event is missing, repeated or out of order, or any call is stuck.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from mcp import Client
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gapless
from examples.serving import Served, serve
from gapless.client.driver import Observation
from gapless.torture.faults import Direction, FaultProxy, Link

STEPS = 40
DELAY = 0.02
STUCK = 60.0

FAULTS = (
    "reset",
    "close",
    "half-open",
    "lost-answer",
    "eaten-101",
    "held-101",
    "cut-in-gap",
    "cut-all",
    "outage",
)


@dataclass
class Outcome:
    """What became of one trial."""

    trial: int
    steps: Literal[1, 2]
    plan: list[tuple[float, str]]
    missing: int = 0
    repeated: int = 0
    reordered: int = 0
    stuck: bool = False
    error: str = ""
    seconds: float = 0.0
    upgrades: int = 0
    got: list[int] = field(default_factory=list)
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=60))

    @property
    def failed(self) -> bool:
        return bool(self.missing or self.repeated or self.reordered or self.stuck or self.error)


class Saboteur:
    """Carries out a plan of faults on one session's links."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.armed: list[str] = []
        proxy.on_request = self.on_request

    def on_request(self, link: Link) -> None:
        if link.request.startswith("POST") and "lost-answer" in self.armed:
            self.armed.remove("lost-answer")
            link.arm(Direction.TO_CLIENT, b"HTTP/1.1 2", Link.reset, before=True)
        if not link.upgraded:
            return
        for fault in ("eaten-101", "held-101", "cut-in-gap"):
            if fault not in self.armed:
                continue
            self.armed.remove(fault)
            if fault == "eaten-101":
                link.arm(Direction.TO_CLIENT, b"HTTP/1.1 101", Link.black_hole, before=True)
            elif fault == "held-101":
                link.arm(Direction.TO_CLIENT, b"HTTP/1.1 101", Link.reset, before=True)
            else:
                link.arm(Direction.TO_CLIENT, b"resume-cursor", Link.reset)
            return

    async def strike(self, fault: str) -> None:
        """Do one fault now, or arm it for when its moment comes."""
        events = [link for link in self.proxy.links if link.carries_events and link.open]
        match fault:
            case "reset":
                for link in events:
                    link.reset()
            case "close":
                for link in events:
                    link.close()
            case "half-open":
                for link in events:
                    link.black_hole()
            case "cut-all":
                for link in list(self.proxy.links):
                    link.reset()
            case "outage":
                self.proxy.refusing = True
                for link in list(self.proxy.links):
                    link.reset()
                await asyncio.sleep(0.15)
                self.proxy.refusing = False
            case _:
                self.armed.append(fault)


def draw(trial: int) -> tuple[Literal[1, 2], list[tuple[float, str]], float]:
    """The plan of a trial, from its number alone: steps through the door, faults, when to migrate."""
    rng = random.Random(trial)
    plan = sorted((rng.uniform(0, STEPS * DELAY), rng.choice(FAULTS)) for _ in range(rng.randint(2, 4)))
    return rng.choice((1, 2)), plan, rng.uniform(0, STEPS * DELAY)


async def run_trial(trial: int, served: Served) -> Outcome:
    """Run one trial."""
    steps, plan, move_at = draw(trial)
    outcome = Outcome(trial, steps, plan)
    began = time.monotonic()
    proxy = FaultProxy("127.0.0.1", served.port)
    await proxy.start()
    saboteur = Saboteur(proxy)
    url = f"http://127.0.0.1:{proxy.port}/mcp"

    def observe(seen: Observation) -> None:
        outcome.upgrades += "bridging → bound" in seen.what
        if seen.what not in ("arrived", "delivered"):
            at = time.monotonic() - began
            outcome.trace.append(f"{at:7.3f} {seen.transport:<9} {seen.cursor}/{seen.committed} {seen.what}")

    connection = gapless.connect(url, steps=steps, observe=observe, answer_timeout=3.0)

    async def sabotage() -> None:
        start = time.monotonic()
        for at, fault in sorted([*plan, (move_at, "migrate")]):
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            outcome.trace.append(f"{time.monotonic() - began:7.3f} *** {fault}")
            if fault == "migrate":
                connection.migrate()
            else:
                await saboteur.strike(fault)

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        outcome.got.append(int(progress))

    faults: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(STUCK):
            async with Client(connection, mode="legacy") as client:
                faults = asyncio.create_task(sabotage())
                arguments = {"steps": STEPS, "delay": DELAY}
                result = await client.call_tool("climb", arguments, progress_callback=progressed)
                text = getattr(result.content[0], "text", "")
                if text != f"climbed {STEPS} steps":
                    outcome.error = text
    except TimeoutError:
        outcome.stuck = True
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        if faults is not None:
            faults.cancel()
        outcome.seconds = time.monotonic() - began
        await proxy.close()
    judge(outcome)
    return outcome


def judge(outcome: Outcome) -> None:
    """Compare what arrived with what was emitted."""
    counts = Counter(outcome.got)
    outcome.missing = sum(1 for step in range(1, STEPS + 1) if step not in counts)
    outcome.repeated = sum(count - 1 for count in counts.values())
    outcome.reordered = sum(1 for a, b in zip(outcome.got, outcome.got[1:], strict=False) if b < a)


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000, help="how many trials (1000)")
    parser.add_argument("--parallel", type=int, default=32, help="how many at a time (32)")
    parser.add_argument("--only", type=int, default=0, help="the first trial's number (0)")
    parser.add_argument("--log", default="memory:", help="the server's log (memory:)")
    options = parser.parse_args()
    console = Console(stderr=True)
    numbers = iter(range(options.only, options.only + options.sessions))
    outcomes: list[Outcome] = []
    flags = ["--log", options.log, "--keepalive", "0.5", "--probe-timeout", "0.5"]
    began = time.monotonic()
    async with serve(flags, ["examples.ladder_server:server"]) as served:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("sessions", total=options.sessions)

            async def work() -> None:
                for trial in numbers:
                    outcomes.append(await run_trial(trial, served))
                    progress.advance(bar)

            await asyncio.gather(*(work() for _ in range(options.parallel)))
    report(outcomes, time.monotonic() - began)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def report(outcomes: list[Outcome], seconds: float) -> None:
    """One table, and a line for each failure."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{len(outcomes)} sessions in {seconds:.0f} s, {STEPS} numbered events each",
    )
    for name in (
        "through the door",
        "sessions",
        "faults",
        "upgrades",
        "missing",
        "repeated",
        "reordered",
        "stuck",
        "errors",
    ):
        table.add_column(name, justify="left" if name == "through the door" else "right")
    groups = (
        ("in one step", [o for o in outcomes if o.steps == 1]),
        ("in two steps", [o for o in outcomes if o.steps == 2]),
        ("all", outcomes),
    )
    for name, group in groups:
        figures = (
            len(group),
            sum(len(o.plan) for o in group),
            sum(o.upgrades for o in group),
            sum(o.missing for o in group),
            sum(o.repeated for o in group),
            sum(o.reordered for o in group),
            sum(o.stuck for o in group),
            sum(bool(o.error) for o in group),
        )
        table.add_row(name, *map(str, figures))
    Console(width=110).print(table)
    for outcome in outcomes:
        if outcome.failed:
            plan = ", ".join(f"{at:.2f}s {fault}" for at, fault in outcome.plan)
            print(
                f"trial {outcome.trial} ({outcome.steps} steps; {plan}): missing {outcome.missing}, repeated "
                f"{outcome.repeated}, reordered {outcome.reordered}, stuck {outcome.stuck} {outcome.error}"
                + "".join(f"\n    {line}" for line in outcome.trace)
                + f"\n  again: python benchmarks/trials.py --only {outcome.trial} --sessions 1"
            )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
