"""The real server, client and log under seeded schedules of everything at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Tally
from tests.simulation.plan import FAULTS, SHORT, Plan
from tests.simulation.seeds import run
from tests.simulation.world import simulate

_DIGEST = """
import sys, tempfile
from pathlib import Path
from tests.conftest import Tally
from tests.simulation.plan import Plan
from tests.simulation.world import simulate
with tempfile.TemporaryDirectory() as root:
    print(simulate(Plan.of(int(sys.argv[1])), Path(root)).trace.digest)
"""


@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "B4", "B9", "N1", "N2", "N3")
def test_what_must_always_hold_holds_in_some_schedules() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SHORT):
        happened += run(seed)
    assert not {*FAULTS, "bound", "restarts", "takeovers", "ended left"} - set(happened), "or it shows little"


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.rule("S1", "S4", "S5", "S6", "L2", "L6", "L7", "C4", "B4", "B9", "N1", "N2", "N3")
def test_what_must_always_hold_holds_in_every_schedule(seeds: range, tally: Tally) -> None:
    for seed in seeds:
        tally(run(seed))


@pytest.mark.parametrize("seed", [3, 10])
def test_a_seed_repeats_itself_to_the_last_step(seed: int, tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("a", "bcd"):  # where the files lie makes no difference
        root = tmp_path / name
        root.mkdir()
        digests.append(simulate(Plan.of(seed), root).trace.digest)
    # Nor does the process: what is hashed, what was imported, what was collected before.
    told = subprocess.run(
        [sys.executable, "-c", _DIGEST, str(seed)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert digests == [told.stdout.strip()] * 2


def test_two_seeds_differ(tmp_path: Path) -> None:
    for name in ("3", "4"):
        (tmp_path / name).mkdir()
    digests = {simulate(Plan.of(seed), tmp_path / str(seed)).trace.digest for seed in (3, 4)}
    assert len(digests) == 2
