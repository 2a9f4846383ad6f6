"""Runs of seeds, and of many on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

from tests.simulation.plan import Plan
from tests.simulation.world import Failure, simulate

__all__ = ["run", "spread"]

T = TypeVar("T")

_REPEAT: Final = "to repeat it: python -m pytest tests/simulation --crash -k every_schedule --seeds 1 --seed"


def run(seed: int) -> Counter[str]:
    """Run the plan of a seed; what happened.

    Raises:
        Failure: something was not as it must be.
    """
    with TemporaryDirectory() as root:
        try:
            world = simulate(Plan.of(seed), Path(root))
        except Failure as failure:
            raise Failure(f"{_REPEAT} {seed}\n{failure}") from None
    return world.happened + Counter(runs=1, steps=world.loop.steps, seconds=round(world.loop.now))


def spread(run: Callable[[T], Counter[str]], items: Iterable[T]) -> Counter[str]:
    """Call `run` with each item, in processes of their own; the sum of what happened.

    Raises:
        Exception: what a run has raised; the others are not waited for.
    """
    total: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        try:
            for happened in pool.map(run, items, chunksize=5):
                total += happened
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return total
