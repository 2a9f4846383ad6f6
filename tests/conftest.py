"""Options of the test suite, and how long hypothesis searches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings

# The same examples each time, and no clock: a busy machine is no failure; pytest's own timeout is the bound.
settings.register_profile(
    "gapless",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make fuzz`: others each time. A test that sets its own number of examples takes it as a share of these.
settings.register_profile(
    "fuzz", settings.get_profile("gapless"), max_examples=2000, derandomize=False, print_blob=True
)
settings.load_profile("gapless")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore-depth",
        choices=["default", "deep"],
        default="default",
        help="how far tests/explore goes: a minute's worth, or hours",
    )
    parser.addoption("--crash", action="store_true", help="run the slow judges of crashes, and those alone")
    parser.addoption(
        "--interop", action="store_true", help="run what needs programs that `make` does not install, alone"
    )
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write what happens now into the files of tests/scenarios",
    )


class Tally(Protocol):
    """Counts what happened in a slow judge; the sums are shown at the end, by test and by what it was of."""

    def __call__(self, happened: Counter[str], of: str = "") -> None: ...


@pytest.fixture
def tally(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Tally:
    name = getattr(request.node, "originalname", request.node.name)

    def count(happened: Counter[str], of: str = "") -> None:
        record_property(f"{name.removeprefix('test_').replace('_', ' ')}{of and ': '}{of}", dict(happened))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("passed", ()):
        for name, happened in report.user_properties:
            sums[name].update(happened)
    for name, happened in sums.items():
        terminalreporter.section(name)
        terminalreporter.line(", ".join(f"{n:,} {what}" for what, n in sorted(happened.items())))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make explore`, `make crash` and `make interop` each have tests that are nowhere else."""
    deep = config.getoption("--explore-depth") == "deep"
    left_out = [
        item
        for item in items
        if any(
            (item.get_closest_marker(kind) is not None) != config.getoption(f"--{kind}")
            for kind in ("crash", "interop")
        )
        or (item.get_closest_marker("deep") is not None and not deep)
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
