"""Options of the simulation: which seeds `--crash` runs."""

from __future__ import annotations

from typing import Final, cast

import pytest

SHARE: Final = 50
"""Seeds of one test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=600, help="how many seeds tests/simulation runs")
    parser.addoption("--seed", type=int, default=0, help="the first of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `seeds` gets all of them, in shares that the cores can divide among themselves."""
    if "seeds" in metafunc.fixturenames:
        first, count = (cast("int", metafunc.config.getoption(option)) for option in ("--seed", "--seeds"))
        every = range(first, first + count)
        shares = [every[at : at + SHARE] for at in range(0, count, SHARE)]
        metafunc.parametrize("seeds", shares, ids=[f"{share[0]}-{share[-1]}" for share in shares])
