"""Which scenario files a run has rewritten; the option is in tests/conftest.py."""

from __future__ import annotations

import pytest

_REWRITTEN = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REWRITTEN] = []


@pytest.fixture
def rewritten(request: pytest.FixtureRequest) -> list[str] | None:
    """Where to note a file that was rewritten; `None` if this run only compares."""
    return request.config.stash[_REWRITTEN] if request.config.getoption("--rewrite-scenarios") else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name in config.stash[_REWRITTEN]:
        terminalreporter.write_line(f"rewritten: {name}")
