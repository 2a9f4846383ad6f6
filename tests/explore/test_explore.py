"""§11 in every state that the real machines and the real log can be in, at small bounds."""

from __future__ import annotations

import pytest

from tests.explore.scenarios import DEEP, DEFAULT
from tests.explore.search import explore
from tests.explore.world import Scenario


@pytest.mark.timeout(600)
@pytest.mark.rule(
    "S1", "S2", "S3", "S4", "S5", "S6", "L2", "L7", "C7", "U1", "U2", "U3", "U4", "U7", "B1", "B6"
)
@pytest.mark.parametrize("scenario", DEFAULT, ids=lambda scenario: scenario.name)
def test_every_interleaving_keeps_what_must_always_hold(
    scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    result = explore(scenario)
    with capsys.disabled():
        print(f"\n  {result}", end="")


def test_the_deep_exploration_keeps_it_too(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if request.config.getoption("--explore-depth") != "deep":
        assert DEEP, "`make explore` runs these"
        return
    for scenario in DEEP:
        result = explore(scenario, most=20_000_000)
        with capsys.disabled():
            print(f"\n  {result}", end="", flush=True)
