"""Runs of seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.simulation.plan import Plan
from tests.simulation.world import Failure, simulate

__all__ = ["run"]

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
