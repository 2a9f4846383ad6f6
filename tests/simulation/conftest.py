"""Options of the simulation: which seeds `--crash` runs."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=2000, help="how many seeds tests/simulation runs")
    parser.addoption("--seed", type=int, default=0, help="the first of them")
