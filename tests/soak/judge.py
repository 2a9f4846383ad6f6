"""Whether something grows, by the samples of a run; and whether all of it is given back at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

__all__ = ["BOUNDS", "Bound", "Growth", "grown", "judge_growth", "judge_rest"]

Samples = Sequence[tuple[float, float]]
"""Seconds, and what was seen then; in order."""

MIB: Final = 2**20
_WINDOWS: Final = 12
_TROUGH: Final = 0.1
_JUDGED: Final = 2 / 3
"""Of the run: before that it warms up."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much something may grow over the judged part of a run, however long that is.

    What leaks grows with time: in an hour the same bound finds a leak twenty times slower than in three
    minutes.

    Attributes:
        most: in its own unit.
        left: how much more of it than at the beginning there may be once nobody is there any more; `None`
            where that says nothing.
        why: it is not 0.
        at: the quantile that stands for a window. What is given back now and then is looked at where it
            has been: a leak lifts the troughs, too, and what happens to be in flight does not.
    """

    most: float
    left: float | None
    why: str
    at: float = 0.5


BOUNDS: Final[Mapping[str, Bound]] = {
    "memory": Bound(
        4 * MIB,
        None,
        "caches of code, and a heap that settles: freed memory is not given back, and 12 sessions at a time "
        "of up to 4 MiB in flight do not all peak in the same window",
        at=_TROUGH,
    ),
    "descriptors": Bound(8, 1, "how many connect at a time is chance; at rest, our own look at /metrics"),
    "threads": Bound(1, 1, "a thread of the pool that looks up names is started when it is first wanted"),
    "children": Bound(6, 0, "two for each session of a stdio server: how many there are at a time is chance"),
    "tasks": Bound(24, 4, "a few for each session and connection; at rest, those of our look at /metrics"),
    "sessions": Bound(6, 0, "how many there are at a time is chance"),
    "connections": Bound(4, 0, "how many there are at a time is chance"),
    "graves": Bound(
        150,
        None,
        "sessions in the log: what is over is taken out once a minute, and how many that are is chance",
        at=_TROUGH,
    ),
    "segments": Bound(10_000, None, "those of as many sessions, of some 70 each", at=_TROUGH),
    "wal": Bound(4 * MIB, None, "it is as large as the largest commits between two checkpoints were"),
}
"""What is watched."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What became of something over the judged part of a run.

    Attributes:
        level: its median.
        most: the largest that was seen.
        grown: by how much, as the slope of the whole part has it.
    """

    level: float
    most: float
    grown: float


def grown(samples: Samples, at: float = 0.5) -> Growth:
    """The growth over the last two thirds of a run.

    A quantile of each of twelve windows, by default the median, stands for what was seen in it, so that a
    peak counts for nothing. The slope is Theil's and Sen's, the median of those between any two windows, so
    that a step does as little.

    Raises:
        ValueError: there are too few samples to say.
    """
    end = samples[-1][0] if samples else 0.0
    begin = samples[0][0] + (end - samples[0][0]) * (1 - _JUDGED) if samples else 0.0
    judged = [(when, value) for when, value in samples if when >= begin]
    if len(judged) < 2 * _WINDOWS or end <= begin:
        raise ValueError(f"{len(samples)} samples are too few to say whether anything grows")
    size = (end - begin) / _WINDOWS
    windows: list[list[tuple[float, float]]] = [[] for _ in range(_WINDOWS)]
    for when, value in judged:
        windows[min(int((when - begin) / size), _WINDOWS - 1)].append((when, value))
    points = [
        (statistics.median(when for when, _ in window), _quantile([value for _, value in window], at))
        for window in windows
        if window
    ]
    slopes = [(late - early) / (then - when) for (when, early), (then, late) in combinations(points, 2)]
    values = [value for _, value in judged]
    return Growth(statistics.median(values), max(values), statistics.median(slopes) * (end - begin))


def _quantile(values: Sequence[float], at: float) -> float:
    return statistics.median(values) if at == 0.5 else sorted(values)[int(at * len(values))]


def judge_growth(series: Mapping[str, Samples]) -> list[str]:
    """What grows more than it may, in words."""
    wrong: list[str] = []
    for name, samples in series.items():
        bound = BOUNDS[name]
        found = grown(samples, bound.at)
        if found.grown > bound.most:
            wrong.append(
                f"{name} grew by {found.grown:,.0f} about {found.level:,.0f}; {bound.most:,.0f} may be"
            )
    return wrong


def judge_rest(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """What there is more of, now that nobody is there, than before anybody was, in words."""
    wrong: list[str] = []
    for name, now in after.items():
        left = BOUNDS[name].left
        if left is not None and now > before[name] + left:
            wrong.append(f"{name} at rest: {now:,.0f}, and {before[name]:,.0f} at the beginning")
    return wrong
