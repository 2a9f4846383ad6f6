"""The named experiments, in the order they are run."""

from __future__ import annotations

from typing import Final

from gapless.torture.experiments.boundary import Boundary
from gapless.torture.experiments.crowd import Crowd
from gapless.torture.experiments.failover import Failover
from gapless.torture.experiments.migration import Migration
from gapless.torture.experiments.resume import Resume
from gapless.torture.experiments.storm import Storm
from gapless.torture.trial import Experiment

__all__ = ["EXPERIMENTS"]

_ALL: Final[tuple[type[Experiment], ...]] = (Resume, Migration, Failover, Boundary, Crowd, Storm)

EXPERIMENTS: Final = {kind.name: kind for kind in _ALL}
"""Every experiment, by its name."""
