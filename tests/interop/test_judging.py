"""What `make interop` makes of what it finds: what is worse behind Gapless, and the page."""

from __future__ import annotations

import pytest

from tests.interop.page import PAGE, Section, rewritten
from tests.interop.run import PARTS
from tests.interop.suites import Outcome, worse

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
