"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore-depth",
        choices=["default", "deep"],
        default="default",
        help="how far tests/explore goes: a minute's worth, or half an hour's",
    )
