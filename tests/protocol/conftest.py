"""The marker that ties a test to the rules it shows."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(*numbers): the rules of the protocol that a test shows")
