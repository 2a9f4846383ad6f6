"""Row 4: what it costs that an event survives the machine.

Gapless on SQLite with `synchronous=FULL` against Gapless on a log in memory, the same stdio server before
both, one call × 1,000 notifications as fast as they can be.
"""

from __future__ import annotations

from benchmarks.harness import Bench, Figure, ratio
from benchmarks.rows.emit import emitting, microseconds

__all__ = ["full"]


def full(bench: Bench) -> list[Figure]:
    """FULL ÷ memory."""
    with bench.gapless() as durable, bench.gapless(log="memory") as fleeting:
        taken = bench.take({"full": emitting(durable, 1, 20), "memory": emitting(fleeting, 1, 20)})
    return [ratio("stdio backend", taken["full"], taken["memory"], 1.3, "at most", microseconds)]
