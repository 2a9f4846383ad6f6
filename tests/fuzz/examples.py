"""How long to search: what tests state beside hypothesis's profile, which tests/conftest.py sets."""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, Phase, settings

__all__ = ["SEARCH", "examples"]

SEARCH: Final = settings(
    max_examples=400,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""For a fault that is known to be there: as far as it takes to find it, and no shrinking."""


def examples(share: float) -> int:
    """So many examples: a share of what the profile in use has."""
    assert settings.default is not None
    return int(settings.default.max_examples * share)
