"""Row 6: what a backlog costs beside live events, and how fast it comes from the disk.

A session's events are read as they are emitted, and again from its beginning by a server that was started
since and has nothing of them in its cache. Then the same with a million events, and how much the server's
memory grows by that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Bench, Figure, NotMeasured, Server, gapless, ratio
from benchmarks.load import DONE, Gapless, burst, check, numbers
from benchmarks.rows.emit import microseconds

__all__ = ["backlog"]

EVENTS = 50_000
MILLION = 1_000_000
KEEP = ("--retain-events", "4000000", "--retain-bytes", str(2**31))


def backlog(bench: Bench) -> list[Figure]:
    """Backlog ÷ live; a million."""
    live: list[float] = []
    replayed: list[float] = []
    with bench.directory() as directory:
        for _ in range(bench.rounds):
            once, again = _pair(bench, directory)
            live.append(once)
            replayed.append(again)
    rates, grown = _million(bench, MILLION // 10 if bench.quick else MILLION)
    return [
        ratio("CPU per event", replayed, live, 0.25, "at most", microseconds),
        Figure("events from disk", 300_000, "at least", tuple(rates), "events/s"),
        Figure("memory that this takes", 10, "at most", tuple(grown), "MiB"),
    ]


@contextmanager
def _serving(bench: Bench, directory: Path) -> Iterator[Server]:
    url = f"sqlite:///{directory / 'gapless.db'}"
    with bench.serving(lambda port: gapless(port, url, "stdio", KEEP)) as server:
        yield server


def _pair(bench: Bench, directory: Path) -> tuple[float, float]:
    """The server's CPU seconds for each event, live and then from the log."""
    with _serving(bench, directory) as server:
        client = Gapless(server.port)
        client.initialize()
        with client.listen() as conn:
            client.ack(burst(client, conn, EVENTS))  # warms it up
        start = client.cursor
        with client.listen() as conn:
            live, data = server.spent(lambda: burst(client, conn, EVENTS))
        check(data, EVENTS)
    with _serving(bench, directory) as server:
        client.port, client.cursor = server.port, start
        client.listen().close()  # the session is loaded, its events are not
        replayed, data = server.spent(lambda: _read(client))
        check(data, EVENTS)
    return live / EVENTS, replayed / EVENTS


def _read(client: Gapless) -> bytes:
    with client.listen() as conn:
        return conn.until(DONE)


def _million(bench: Bench, events: int) -> tuple[list[float], list[float]]:
    """Events per second, and MiB of growth, of reading a log of so many events from its start."""
    rates: list[float] = []
    grown: list[float] = []
    part = 50_000
    with bench.directory() as directory:
        with _serving(bench, directory) as server:
            client = Gapless(server.port)
            start = client.cursor
            client.initialize()
            conn = client.listen()
            for _ in range(events // part):
                burst(client, conn, part)
            conn.close()
        for _ in range(min(bench.rounds, 3)):
            with _serving(bench, directory) as server:
                client.port, client.cursor = server.port, start
                client.listen().close()
                before = server.memory("Rss")
                peak, taken = _swallow(client, server, events, part)
                rates.append(events / taken)
                grown.append((peak - before) / 2**20)
    return rates, grown


def _swallow(client: Gapless, server: Server, events: int, part: int) -> tuple[int, float]:
    """Read a whole log; the most memory that the server held meanwhile, and the seconds it took."""
    parts: list[bytes] = []
    peak, left = 0, events // part
    begun = time.perf_counter()
    with client.listen() as conn:
        seen = b""
        while left:
            data = conn.recv()
            left -= (seen[1 - len(DONE) :] + data).count(DONE)
            seen = data
            parts.append(data)
            if len(parts) % 256 == 0:
                peak = max(peak, server.memory("Rss"))
    taken = time.perf_counter() - begun
    found = numbers(b"".join(parts))
    if found != [*range(part)] * (events // part):
        raise NotMeasured("the backlog did not arrive whole and in order")
    return max(peak, server.memory("Rss")), taken
