"""Each experiment catches what the field reports saw, and finds nothing where nothing is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gapless.torture.experiments import EXPERIMENTS, crowd, failover, storm
from gapless.torture.schedule import parse_schedule
from gapless.torture.trial import Violation
from gapless.torture.trials import Result, discover, run_experiment
from tests.torture.naive import naive_server
from tests.torture.naive_switches import NaiveSwitches


@dataclass(frozen=True)
class Case:
    """A switch of the naive server, the experiment that is named for it, and what that finds."""

    switch: str
    experiment: str
    found: Violation
    words: str
    """What a reader of the reports would look for."""
    seeds: tuple[int, ...]
    schedule: str | None = None


CASES = (
    # The first report.
    Case("forgets_the_gap", "migration", Violation.MISSING, "skipped", (0, 3)),
    Case("upgrades_past_eviction", "migration", Violation.MISSING, "skipped", (1,)),
    Case("believes_echoes", "migration", Violation.ECHO_BELIEVED, "echoed cursor", (2,)),
    # The second.
    Case("no_echo", "failover", Violation.NO_ECHO, "without X-MCP-Resume-Cursor", (0,)),
    Case("no_echo", "failover", Violation.MISSING, "skipped on either transport; no error", (0,)),
    Case("stale_echo", "failover", Violation.STALE_ECHO, "the 101 says", (0, 1, 2, 3)),
    Case("frames_before_ack", "failover", Violation.ABOVE_CURSOR, "before its cursor-ack", (0,)),
    # The third.
    Case("idle_at_the_boundary", "boundary", Violation.STUCK, "idle stream: deadlock", (0,)),
    Case("idle_at_the_boundary", "boundary", Violation.STUCK, "idle stream: deadlock", (10,)),
    Case("second_acceptance", "boundary", Violation.DUAL_NEGOTIATION, "upgrade-accepted", (10,)),
    Case("second_acceptance", "boundary", Violation.DUAL_NEGOTIATION, "accepted while pending", (20,)),
    Case("bound_while_on_sse", "failover", Violation.STUCK, "409 websocket-bound", (1,)),
    # What any server can have.
    Case("replays_then_registers", "resume", Violation.MISSING, "rungs", (0, 1), "10:reset 30:reset"),
    Case("silent_cursor", "resume", Violation.SILENT_CURSOR, "200", (0, 1, 2, 3, 4, 5), ""),
    Case("repeats", "resume", Violation.REPEATED, "rungs", (0,), "10:reset 30:reset"),
    Case("reorders", "resume", Violation.REORDERED, "rungs", (0, 1), "10:reset 30:reset 40:reset"),
    Case("forgets_the_result", "resume", Violation.UNANSWERED, "no answer", (0,), "55:outage"),
    Case("ends_early", "resume", Violation.FALSE_CAUGHT_UP, "good order", (0,), "20:reset"),
    Case("shares_cursors", "resume", Violation.FOREIGN, "other session's", (0, 1, 2, 3, 4, 5), ""),
    Case("runs_twice", "storm", Violation.RUN_TWICE, "begun", (0, 3), "0:repeat"),
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never comes is given up sooner than where a verdict hangs on it."""
    monkeypatch.setattr(failover, "_MOST", 5.0)
    monkeypatch.setattr(storm, "_MOST", 10.0)


async def run(
    switches: NaiveSwitches, experiment: str, seeds: tuple[int, ...], schedule: str | None
) -> Result:
    async with naive_server(switches) as url:
        target = await discover(url)
        steps = None if schedule is None else parse_schedule(schedule)
        return await run_experiment(EXPERIMENTS[experiment], target, iter(seeds), schedule=steps)


def switched(experiment: str, **switches: Any) -> NaiveSwitches:
    """The server as the experiment wants it."""
    wanted = {"migration": {"retain_events": 40}, "crowd": {}, "resume": {}}
    quick = {"keepalive": 0.5, "probe_timeout": 0.5}
    return NaiveSwitches(**{**wanted.get(experiment, quick), **switches})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.switch}-{case.found.name.lower()}")
async def test_each_failure_is_caught_by_the_experiment_named_for_it(case: Case) -> None:
    switches = switched(case.experiment, **{case.switch: True})
    result = await run(switches, case.experiment, case.seeds, case.schedule)
    details = [
        finding.detail
        for failure in result.failures
        for finding in failure.findings
        if finding.violation is case.found
    ]
    assert details, f"found {dict(result.violations)}"
    assert any(case.words in detail for detail in details), details


@pytest.mark.parametrize(
    ("experiment", "seeds"),
    [
        ("resume", (0, 1, 2, 3)),
        ("migration", (0, 1, 2, 3, 4, 5)),
        ("failover", (0, 1, 2, 3)),
        ("boundary", (0, 10, 20, 31)),
        ("storm", (0, 1, 2, 3)),
    ],
)
async def test_nothing_is_found_where_nothing_is_wrong(experiment: str, seeds: tuple[int, ...]) -> None:
    result = await run(switched(experiment), experiment, seeds, None)
    assert result.trials == len(seeds)
    assert result.violations == {}, [failure.findings for failure in result.failures]


@pytest.fixture
def small_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen readers, and no patience with the server."""
    for name, value in {"_READERS": 12, "_SLOW": 1, "_SILENT": 3, "_MOST": 6.0, "_DELAY": 0.02}.items():
        monkeypatch.setattr(crowd, name, value)


@pytest.mark.usefixtures("small_crowd")
async def test_a_slow_reader_that_delays_everybody_is_caught_by_the_crowd() -> None:
    result = await run(switched("crowd", one_queue=True), "crowd", (0,), None)
    assert result.violations[Violation.DELAYED] > 0


@pytest.mark.usefixtures("small_crowd")
async def test_a_crowd_finds_nothing_where_nobody_is_delayed() -> None:
    result = await run(switched("crowd"), "crowd", (0,), None)
    assert result.violations == {}
    assert result.counts["slow or silent"] == 4


def test_every_failure_the_naive_server_can_have_is_caught() -> None:
    switches = {name for name, value in NaiveSwitches.__dataclass_fields__.items() if value.type == "bool"}
    assert switches == {case.switch for case in CASES} | {"one_queue"}
