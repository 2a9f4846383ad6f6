"""Row 10: what a client of ours reads, beside the SDK's.

Each in a process of its own on the load's core, from one Gapless with its log in memory, whose stdio server
emits 5,000 notifications in a call. Read are the messages that the transport hands to the SDK's session, from
both; and from ours the bytes alone. Ours checks every link, acknowledges, and goes through the door; the
SDK's does none of that. What the server can emit is the bound.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from statistics import median

from benchmarks.harness import HERE, LOAD_CORE, ROOT, Bench, Figure, Server, WrongEvents, on_core, ratio

__all__ = ["reading"]

EVENTS = 5_000
CALLS = 4


def reading(bench: Bench) -> list[Figure]:
    """Events per second, ours ÷ the SDK's."""
    with bench.gapless(log="memory") as server:
        taken = bench.take({kind: _rate(server, kind) for kind in ("sdk", "ours", "raw")})
    return [
        ratio("the stream of the SDK's session", taken["ours"], taken["sdk"], 1.5, "at least", rate),
        ratio("ours raw ÷ the SDK's", taken["raw"], taken["sdk"], 5, "at least", rate),
    ]


def _rate(server: Server, kind: str) -> Callable[[], float]:
    """The middle of a process's calls; the first warms it up."""
    program = str(HERE / "servers" / "reader.py")
    url = f"http://127.0.0.1:{server.port}/mcp"

    def measure() -> float:
        with on_core(LOAD_CORE):
            done = subprocess.run(
                [sys.executable, program, kind, url, str(EVENTS), str(CALLS)],
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        if done.returncode:
            raise WrongEvents(f"the {kind} client failed: {done.stderr[-500:]}")
        return median(float(line) for line in done.stdout.split()[1:])

    return measure


def rate(value: float) -> str:
    """For people."""
    return f"{value:,.0f}/s"
