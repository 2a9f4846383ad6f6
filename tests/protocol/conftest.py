"""The marker that ties a test to the rules it shows."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A busy machine is no failure; pytest's own timeout is the bound.
settings.register_profile("gapless", deadline=None)
settings.load_profile("gapless")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(*numbers): the rules of the protocol that a test shows")
