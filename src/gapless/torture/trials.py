"""Runs trials: many at once, one again, or a failed one with fewer and fewer faults."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httpx2

from gapless.errors import TargetError
from gapless.torture.door import DoorSession
from gapless.torture.ladder import as_object
from gapless.torture.schedule import Schedule
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Described, Experiment, Target, Trace, Trial, View, Violation

__all__ = ["Result", "discover", "run_experiment", "run_trial", "shrink"]

_TRIAL_MOST: Final = 180.0
"""Seconds that any trial may take."""
_FAILURES_KEPT: Final = 20
"""Failed trials of an experiment whose timelines are kept."""
_SHRINKING: Final = 120.0
"""Seconds after which no further schedule is tried."""
_AGAIN: Final = 3
"""How often a shorter schedule is tried before it is taken for harmless."""
_TOOLS: Final[dict[str, Any]] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


@dataclass(slots=True)
class Result:
    """What came of an experiment.

    Attributes:
        violations: how many events or calls were hit by each kind.
        failed: how many trials found something.
        failures: the first of them, with their timelines.
        shrunk: the shortest schedule found that still fails, by the trial's seed.
    """

    experiment: type[Described]
    trials: int = 0
    failed: int = 0
    seconds: float = 0.0
    violations: Counter[Violation] = field(default_factory=Counter[Violation])
    counts: Counter[str] = field(default_factory=Counter[str])
    measures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failures: list[Trial] = field(default_factory=list[Trial])
    shrunk: dict[int, Schedule] = field(default_factory=dict[int, Schedule])

    def add(self, trial: Trial) -> None:
        """Count a trial; its timeline is kept only if it failed."""
        self.trials += 1
        self.failed += trial.failed
        self.counts.update(trial.counts)
        for name, values in trial.measures.items():
            self.measures.setdefault(name, []).extend(values)
        for finding in trial.findings:
            self.violations[finding.violation] += finding.amount
        if trial.failed and len(self.failures) < _FAILURES_KEPT:
            self.failures.append(trial)


async def discover(url: str, pid: int | None = None) -> Target:
    """Find out what a server speaks, and that it has a ladder.

    Raises:
        TargetError: nothing there can be judged.
    """
    views: set[View] = set()
    refusal = ""
    for view, kind in ((View.SESSION, DoorSession), (View.STANDARD, StandardSession)):
        try:
            async with kind(url, Trace()) as session:
                await session.open()
                answer = await session.ask(_TOOLS)
        except TargetError as error:
            refusal = str(error)
            continue
        views.add(view)
        if not _has_ladder(answer):
            hint = "add the tools ladder and runs: docs/how-to/test-your-own-server.md shows them"
            raise TargetError(f"the server at {url} has no tool called ladder", hint=hint)
    if not views:
        raise TargetError(f"no MCP server can be judged at {url}: {refusal}")
    return Target(url, pid, frozenset(views))


def _has_ladder(answer: dict[str, Any]) -> bool:
    tools = as_object(answer.get("result")).get("tools")
    return isinstance(tools, list) and any(
        as_object(tool).get("name") == "ladder" for tool in cast("list[Any]", tools)
    )


async def run_trial(
    experiment: Experiment, target: Target, seed: int, schedule: Schedule | None = None
) -> Trial:
    """One trial, by its seed; with another schedule if one is given."""
    trial = Trial(experiment.name, seed, experiment.plan(seed) if schedule is None else schedule)
    most = asyncio.timeout(_TRIAL_MOST)
    try:
        async with most:
            await experiment.run(target, trial)
    except (TargetError, httpx2.HTTPError, TimeoutError) as error:
        told = f"the trial is not over after {_TRIAL_MOST:.0f} s" if most.expired() else str(error)
        trial.find(Violation.STUCK, told or f"the server does not answer: {type(error).__name__}")
    trial.seconds = trial.trace.now
    return trial


async def run_experiment(
    kind: type[Experiment],
    target: Target,
    seeds: Iterator[int],
    *,
    jobs: int | None = None,
    seconds: float | None = None,
    schedule: Schedule | None = None,
    done: Callable[[Trial], None] = lambda trial: None,
) -> Result:
    """Run trials, `jobs` at once, until the seeds are used up or the time is.

    Args:
        seconds: no trial is begun after so long.
        done: called after each trial.
    """
    experiment, result, began = kind(), Result(kind), time.monotonic()

    async def worker() -> None:
        for seed in seeds:
            if seconds is not None and time.monotonic() - began > seconds:
                return
            trial = await run_trial(experiment, target, seed, schedule)
            result.add(trial)
            done(trial)

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs or kind.jobs):
            group.create_task(worker())
    result.seconds = time.monotonic() - began
    return result


async def shrink(kind: type[Experiment], target: Target, failure: Trial) -> Schedule | None:
    """A shorter schedule with which the trial still fails in the same way; `None` if it never does again.

    Steps are left out one by one; each shorter schedule has a few chances to fail, since the wire
    is no clockwork. After two minutes the shortest one found by then is good enough.
    """
    experiment, until = kind(), time.monotonic() + _SHRINKING
    kinds = {finding.violation for finding in failure.findings}

    async def fails(schedule: Schedule) -> bool:
        for _ in range(_AGAIN):
            trial = await run_trial(experiment, target, failure.seed, schedule)
            if kinds & {finding.violation for finding in trial.findings}:
                return True
        return False

    if not await fails(failure.schedule):
        return None
    schedule = failure.schedule
    for step in failure.schedule:
        shorter = tuple(kept for kept in schedule if kept is not step)
        if time.monotonic() < until and await fails(shorter):
            schedule = shorter
    return schedule
