"""A death at every point of one course of things loses nothing (§11)."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from tests.conftest import Tally
from tests.simulation.struck import Victim, points, strike

_FEW: Final = 131
"""`make test` takes each so-and-so-many-th point."""
_MANY: Final[dict[Victim, int]] = {"server": 1, "disk": 17, "owner": 31, "machine": 31, "client": 31}
"""So does `make crash`: of the points of a server that is alone, all."""
_SHARES: Final = 10


@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "N1", "N2", "N3")
@pytest.mark.parametrize("victim", get_args(Victim))
def test_a_death_at_some_points_loses_nothing(victim: Victim) -> None:
    there = points(victim)
    for point in range(1 + there % _FEW, there + 1, _FEW):
        happened = strike(victim, point)
        assert victim in ("client", "owner") or happened["restarts"] == 1


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "N1", "N2", "N3")
@pytest.mark.parametrize("share", range(_SHARES))
@pytest.mark.parametrize("victim", get_args(Victim))
def test_a_death_at_any_point_loses_nothing(victim: Victim, share: int, tally: Tally) -> None:
    for point in range(1, points(victim) + 1, _MANY[victim])[share::_SHARES]:
        tally(strike(victim, point), victim)
