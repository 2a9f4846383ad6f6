"""What `make interop` makes of what it finds: what is worse behind Gapless, and the page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.page import PAGE, Section, rewritten
from tests.interop.processes import run
from tests.interop.run import PARTS
from tests.interop.suites import Outcome, on_call, worse

PASSED, FAILED = ("ping", "ping"), ("ping", "pong")


def test_what_passes_alone_and_fails_or_is_not_judged_behind_gapless_is_worse() -> None:
    alone = Outcome({PASSED: "SUCCESS", FAILED: "FAILURE", ("list", "list"): "SUCCESS"})
    behind = Outcome({PASSED: "WARNING", FAILED: "FAILURE"})
    assert worse(alone, behind) == {PASSED: "WARNING", ("list", "list"): "ABSENT"}
    assert worse(alone, alone) == {}


@pytest.mark.parametrize(
    "outcome",
    [Outcome({}), Outcome({PASSED: "SUCCESS", FAILED: "FAILURE"}), Outcome({PASSED: "SUCCESS"}, "late")],
)
def test_a_suite_that_failed_somewhere_or_judged_nothing_or_did_not_end_is_not_good(outcome: Outcome) -> None:
    assert not outcome.good


def test_an_outcome_is_the_sum_of_its_scenarios() -> None:
    whole = Outcome({PASSED: "SUCCESS", FAILED: "FAILURE", ("list", "list"): "SUCCESS"})
    assert {name: str(part) for name, part in whole.scenarios.items()} == {"ping": "1/1", "list": "1/0"}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_on_call_does_what_the_suite_asks_and_its_failure_is_told(fails: bool) -> None:
    asked: list[Any] = []

    async def client(url: str, scenario: str, context: dict[str, Any]) -> None:
        asked.append((url, scenario, context))
        if fails:
            raise ValueError("no such tool")

    asks = {"MCP_CONFORMANCE_SCENARIO": "auth/ping", "MCP_CONFORMANCE_CONTEXT": '{"client_id": "é"}'}
    async with on_call(client) as (command, failures):
        ended = await run([*command.split(), "http://localhost/mcp"], 30, env=asks)
    assert asked == [("http://localhost/mcp", "auth/ping", {"client_id": "é"})]
    assert ended.status == int(fails)
    told = ["auth/ping: the client failed: ValueError('no such tool')"] if fails else []
    assert failures == told
    assert ended.stderr.strip().splitlines() == told


def test_the_page_has_a_place_for_every_part_and_keeps_what_is_around_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in PARTS:
        new = rewritten(page, [Section(name, ["a", "b"], [["1", "2"]])])
        assert "| a | b |\n| --- | --- |\n| 1 | 2 |\n" in new
        before, _, _ = page.partition(f"<!-- make interop: {name} -->")
        assert new.startswith(before)


def test_a_part_without_a_place_on_the_page_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        rewritten("# A page\n", [Section("nowhere", ["a"])])
