"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore-depth",
        choices=["default", "deep"],
        default="default",
        help="how far tests/explore goes: a minute's worth, or hours",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make explore` has the deep explorations; elsewhere they are no tests."""
    if config.getoption("--explore-depth") == "deep":
        return
    deep = [item for item in items if item.get_closest_marker("deep") is not None]
    items[:] = [item for item in items if item not in deep]
    config.hook.pytest_deselected(items=deep)
