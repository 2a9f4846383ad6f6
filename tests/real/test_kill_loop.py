"""Servers killed at any moment, by the command that does it to anybody's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

import pytest

from tests.conftest import Tally

_TORTURE = (sys.executable, "-m", "gapless", "torture", "--app", "examples.ladder_server:server")


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "N1", "N2", "N3")
async def test_two_hundred_kills_lose_nothing(tally: Tally) -> None:
    """Both views climb at full speed, through the door as well; then the log and the receipts are audited."""
    torture = await asyncio.create_subprocess_exec(
        *_TORTURE, "--experiment", "kill", "--trials", "200", "--json", stdout=asyncio.subprocess.PIPE
    )
    told, _ = await torture.communicate()
    (kill,) = json.loads(told)["experiments"]
    tally(Counter(kill["counts"]))
    assert (torture.returncode, kill["violations"], kill["counts"]["kills"]) == (0, {}, 200)
