"""Row 3: how far Gapless is from a loop that only syncs and sends.

The loop writes the very bytes of the events to a file, calls `fdatasync`, and sends them, 64 events to a
batch; it reads nothing, links nothing, keeps no state. Gapless is given 64 lines at a time by its stdio
server: with pauses between the batches for CPU (so that each is a commit), without for throughput (where
commits take what has gathered, and a note says how much that was). Told besides: our log alone, given the
same bytes, which is the least that the CPU could be.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from benchmarks.harness import Bench, Figure, Server, ratio
from benchmarks.load import DONE, Conn, Gapless, burst, check, request
from benchmarks.rows.emit import microseconds

__all__ = ["loop"]

BATCH = 64
PAUSED = 100 * BATCH
FAST = 500 * BATCH
PAUSE = 0.002


def loop(bench: Bench) -> list[Figure]:
    """Ours ÷ the loop."""
    with (
        bench.gapless() as ours,
        bench.bare() as floor,
        bench.directory() as directory,
        bench.asked("log.py", str(directory / "log.db")) as log,
    ):
        read_ours, read_floor = _ours(ours), _floor(floor)
        cpu = bench.take(
            {
                "ours": lambda: _cost(ours, read_ours),
                "bare": lambda: _cost(floor, read_floor),
                "log": lambda: log(f"cpu {PAUSED // BATCH} {BATCH}"),
            }
        )
        before = commits(ours)
        rate = bench.take({"ours": lambda: _rate(read_ours), "bare": lambda: _rate(read_floor)})
        events, count = (now - then for now, then in zip(commits(ours), before, strict=True))
    bench.note(f"without pauses a commit of ours held {events / count:.0f} events on average")
    return [
        ratio("CPU per event", cpu["ours"], cpu["bare"], 4, "at most", microseconds),
        ratio("our log alone", cpu["log"], cpu["bare"], None, "at most", microseconds),
        ratio("throughput", rate["ours"], rate["bare"], 0.3, "at least", lambda v: f"{v:,.0f}/s"),
    ]


Read = Callable[[int, float], bytes]


def _ours(server: Server) -> Read:
    client = Gapless(server.port)
    client.initialize()

    def read(count: int, pause: float) -> bytes:
        with client.listen() as conn:
            data = burst(client, conn, count, batch=BATCH, pause=pause)
        client.ack(data)
        return data

    return read


def _floor(server: Server) -> Read:
    conn = Conn(server.port)

    def read(count: int, pause: float) -> bytes:
        conn.send(f"burst {count} {BATCH} {pause}\n".encode())
        return conn.until(DONE)

    return read


def _cost(server: Server, read: Read) -> float:
    spent, data = server.spent(lambda: read(PAUSED, PAUSE))
    check(data, PAUSED)
    return spent / PAUSED


def _rate(read: Read) -> float:
    begun = time.perf_counter()
    data = read(FAST, 0.0)
    taken = time.perf_counter() - begun
    check(data, FAST)
    return FAST / taken


def commits(server: Server) -> tuple[float, float]:
    """How many events were committed so far, and in how many commits."""
    with Conn(server.port) as conn:
        _, _, body = conn.ask(request("GET", "/metrics", server.port, {}))
    found = [re.search(rb"^%s (\S+)" % name, body, re.M) for name in _COUNTED]
    events, count = (float(match[1]) if match else 0.0 for match in found)
    return events, count


_COUNTED = (rb"gapless_events_total", rb"gapless_commit_seconds_count")
