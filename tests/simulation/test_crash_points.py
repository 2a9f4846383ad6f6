"""A death at every point of one course of things loses nothing (§11)."""

from __future__ import annotations

from functools import partial
from typing import Final, get_args

import pytest

from tests.simulation.spread import spread
from tests.simulation.struck import Victim, points, strike

EVERY: Final = 131
"""`make test` takes each so-and-so-many-th point."""


@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "N1", "N2", "N3")
@pytest.mark.parametrize("victim", get_args(Victim))
def test_a_death_at_some_points_loses_nothing(victim: Victim) -> None:
    there = points(victim)
    for point in range(1 + there % EVERY, there + 1, EVERY):
        happened = strike(victim, point)
        assert victim in ("client", "owner") or happened["restarts"] == 1


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "N1", "N2", "N3")
@pytest.mark.parametrize("victim", get_args(Victim))
def test_a_death_at_any_point_loses_nothing(victim: Victim, capsys: pytest.CaptureFixture[str]) -> None:
    there = points(victim)
    happened = spread(partial(strike, victim), range(1, there + 1))
    with capsys.disabled():
        print(f"\n  {victim}: {', '.join(f'{n} {what}' for what, n in sorted(happened.items()))}", end="")
    assert happened["points"] == there
