"""The short form of `make attack`: some of everything, at each server."""

from __future__ import annotations

import pytest

from tests.attack.__main__ import attack
from tests.attack.campaign import FAMILIES


@pytest.mark.parametrize(("server", "inputs"), [("sdk", 8_000), ("stdio", 3_000), ("guarded", 3_000)])
async def test_no_bad_input_breaks_a_verdict(server: str, inputs: int) -> None:
    report = await attack(server, inputs, 1, quick=True)
    assert report.findings.wrong == {}, report.findings.examples
    assert report.findings.sent >= inputs
    assert set(report.findings.inputs) == {family.name for family in FAMILIES}
    assert (report.rungs > 0) == (server != "guarded")
