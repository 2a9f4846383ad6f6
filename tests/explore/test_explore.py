"""§11 in every state that the real machines and the real log can be in, at small bounds."""

from __future__ import annotations

import pytest

from tests.explore.scenarios import DEEP, DEFAULT
from tests.explore.search import explore
from tests.explore.world import FAULTS, Scenario


@pytest.mark.timeout(600)
@pytest.mark.rule(
    "S1", "S2", "S3", "S4", "S5", "S6", "L2", "L4", "L6", "L7", "C7", "U1", "U2", "U3", "U4", "U7", "B1", "B6"
)
@pytest.mark.parametrize("scenario", DEFAULT, ids=lambda scenario: scenario.name)
def test_every_interleaving_keeps_what_must_always_hold(
    scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    result = explore(scenario)
    with capsys.disabled():
        print(f"\n  {result}", end="")
    # An end that is allowed and a fault that is asked for, but never comes, would prove nothing.
    assert result.ends == scenario.ends
    assert result.actions >= (scenario.kinds & FAULTS if scenario.faults else set()) - {"overdue", "late"}


def test_together_the_scenarios_have_everything_happen() -> None:
    kinds = frozenset[str]().union(*(s.kinds for s in DEFAULT if s.faults))
    assert kinds == FAULTS
    assert {s.view for s in DEFAULT} == {"session", "stream"}
    assert {s.client.get("steps") for s in DEFAULT if s.faults >= 2} >= {1, 2}
    assert any(s.second is not None for s in DEFAULT)
    assert {s.on_backend_loss for s in DEFAULT if "restart" in s.kinds} == {"supersede", "restart"}
    # Events beside `upgrade-accepted`, of which each door adds one.
    assert max(s.before + s.emits for s in DEFAULT) >= 4


@pytest.mark.deep
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("scenario", DEEP, ids=lambda scenario: scenario.name)
def test_deeper_explorations_keep_it_too(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    result = explore(scenario, most=20_000_000)
    with capsys.disabled():
        print(f"\n  {result}", end="", flush=True)
