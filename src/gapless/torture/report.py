"""What a run comes to: one plain structure, which the table, the JSON and the page all show."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from gapless.torture.schedule import Schedule, format_schedule
from gapless.torture.trial import Trial
from gapless.torture.trials import Result

__all__ = ["command", "report", "summary"]


def report(
    target: str, again: Sequence[str], results: Sequence[Result], left_out: dict[str, str]
) -> dict[str, Any]:
    """Everything, as JSON has it.

    Args:
        target: what was judged, in words.
        again: the command line that names it.
        left_out: experiments that were not run, and why.
    """
    return {
        "target": target,
        "violations": sum(sum(result.violations.values()) for result in results),
        "experiments": [summary(result, again) for result in results],
        "left out": left_out,
    }


def summary(result: Result, again: Sequence[str]) -> dict[str, Any]:
    """One experiment."""
    return {
        "name": result.experiment.name,
        "about": result.experiment.about,
        "trials": result.trials,
        "failed trials": result.failed,
        "seconds": round(result.seconds, 1),
        "violations": {violation.value: count for violation, count in result.violations.items()},
        "counts": dict(result.counts),
        "measures": {name: _spread(values) for name, values in result.measures.items()},
        "failures": [_failure(result, trial, again) for trial in result.failures],
    }


def _spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest; milliseconds unless the name says otherwise."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "most": round(ordered[-1], 2),
    }


def _failure(result: Result, trial: Trial, again: Sequence[str]) -> dict[str, Any]:
    shrunk = result.shrunk.get(trial.seed)
    schedule = trial.schedule if shrunk is None else shrunk
    planned = result.experiment().plan(trial.seed)
    return {
        "seed": trial.seed,
        "schedule": format_schedule(trial.schedule),
        "shrunk": None if shrunk is None else format_schedule(shrunk),
        "again": command(trial, None if schedule == planned else schedule, again),
        "findings": [
            {
                "violation": finding.violation.value,
                "meaning": finding.violation.meaning,
                "detail": finding.detail,
                "amount": finding.amount,
            }
            for finding in trial.findings
        ],
    }


def command(trial: Trial, schedule: Schedule | None, again: Sequence[str]) -> str:
    """The command line that repeats a trial, with a schedule if it is not its seed's own."""
    first = trial.seed if trial.since is None else trial.since
    words = ["gapless", "torture", "-e", trial.experiment, "--seed", str(first)]
    words += ["--trials", str(trial.seed - first + 1)]
    if schedule is not None:
        words += ["--schedule", format_schedule(schedule)]
    return shlex.join([*words, *again])
