"""Row 13: how late one event is that comes alone.

A stdio server emits one event every 5 ms, with the clock in it; the floor is a process that writes the same
bytes, calls `fdatasync` and sends them. Late is what lies between that clock and the client's, on the same
machine. Then the same while another session emits 5,000 events a second.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks.harness import (
    HERE,
    LOAD_CORE,
    ROOT,
    Bench,
    Figure,
    Server,
    on_core,
    ratio,
)
from benchmarks.load import DONE, Conn, Gapless, check

__all__ = ["event", "lateness"]

EVENTS = 200
EVERY = 0.005

_AT = re.compile(rb'"at": ?(\d+)')


def event(bench: Bench) -> list[Figure]:
    """Ours ÷ the floor, alone and with the loop busy."""
    with bench.gapless() as ours, bench.bare() as floor:
        measures = {"ours": _ours(ours), "bare": _floor(floor)}
        quiet = bench.take({name: lambda m=m: median(m()) for name, m in measures.items()})
        with busy(ours):
            loaded = bench.take({name: lambda m=m: median(m()) for name, m in measures.items()})
    return [
        ratio("the loop idle", quiet["ours"], quiet["bare"], 2.5, "at most", microseconds),
        ratio("the loop busy besides", loaded["ours"], quiet["bare"], 2.5, "at most", microseconds),
    ]


def lateness(conn: Conn, count: int) -> list[float]:
    """How many seconds after its emission each of so many events was here."""
    late: list[float] = []
    parts: list[bytes] = []
    seen = b""
    while DONE not in seen:
        data = conn.recv()
        now = time.monotonic_ns()
        parts.append(data)
        seen += data
        whole, _, seen = seen.rpartition(b"\n\n") if DONE not in seen else (seen, b"", seen)
        late += [(now - int(at)) / 1e9 for at in _AT.findall(whole)]
    check(b"".join(parts), count)
    return late


def _ours(server: Server) -> Callable[[], list[float]]:
    client = Gapless(server.port)
    client.initialize()
    conn = client.listen()

    def measure() -> list[float]:
        client.call("tick", count=EVENTS, every=EVERY)
        return lateness(conn, EVENTS)

    return measure


def _floor(server: Server) -> Callable[[], list[float]]:
    conn = Conn(server.port)

    def measure() -> list[float]:
        conn.send(f"tick {EVENTS} {EVERY}\n".encode())
        return lateness(conn, EVENTS)

    return measure


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Another session emits 5,000 events a second, and is read by a process of its own."""
    program = str(HERE / "servers" / "bystander.py")
    with on_core(LOAD_CORE):
        process = subprocess.Popen(
            [sys.executable, program, str(server.port)],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it reads
        yield
    finally:
        process.kill()
        process.wait()


def microseconds(value: float) -> str:
    """For people."""
    return f"{value * 1e6:,.0f} µs"
