"""Row 4: what it costs that an event survives the machine.

Gapless on SQLite with `synchronous=FULL` against Gapless on a log in memory, the same stdio server before
both, one call × 1,000 notifications as fast as they can be. Told besides: what it would be if `FULL` added
nothing but our log alone, committing the same bytes in two halves, which is about what it comes to.
"""

from __future__ import annotations

from benchmarks.harness import Bench, Figure, ratio
from benchmarks.rows.emit import EVENTS, emitting, microseconds

__all__ = ["full"]


HALF = EVENTS // 2


def full(bench: Bench) -> list[Figure]:
    """FULL ÷ memory."""
    with (
        bench.gapless() as durable,
        bench.gapless(log="memory") as fleeting,
        bench.directory() as directory,
        bench.asked("log.py", str(directory / "log.db")) as log,
    ):
        taken = bench.take(
            {
                "full": emitting(durable, 1, 20),
                "memory": emitting(fleeting, 1, 20),
                "log": lambda: log(f"cpu 40 {HALF}"),
            }
        )
    memory = taken["memory"]
    least = [a + b for a, b in zip(memory, taken["log"], strict=True)]
    return [
        ratio("stdio backend", taken["full"], memory, 1.3, "at most", microseconds),
        ratio("our log alone on top: the least there could be", least, memory, None, "at most", microseconds),
    ]
