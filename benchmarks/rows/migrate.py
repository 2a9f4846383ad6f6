"""Row 8: what it costs to go from SSE to a WebSocket while events keep coming.

A stdio server emits 1,000 events a second for some seconds, and every 25 ms the client moves: it reconnects
its event stream; it leaves that by a handshake that states its cursor, reads the echo and the gap, and
acknowledges, which is a crossing; it goes back. A reconnect and a crossing are counted from before the TCP
connection until the client is live again. The pause is the longest time between two events that the client
sees, from the handshake until 25 ms after it is live; events come 1 ms apart, so it is never much below that.
Told besides is the longest in 25 ms without a move: what the stream is like by itself; and of the
added time the least that there could be: uvicorn's handshake without anything behind it, less its event
stream, and one commit, for who holds the session must be durable before the 101 says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from benchmarks.harness import Bench, Figure, Server, percentile, ratio
from benchmarks.load import DONE, FLOOR, Conn, Gapless, check, last_id
from benchmarks.rows.latency import milliseconds

__all__ = ["crossing"]

EVENTS = 5_000
EVERY = 0.001
MOVES = 100
"""Of each kind, where nothing is behind them."""
STAY = 0.025
"""Seconds between two moves."""


@dataclass(slots=True)
class Journey:
    """What a client saw of one stream of events, through all its moves."""

    seen: list[bytes] = field(default_factory=list[bytes])
    arrivals: list[float] = field(default_factory=list[float])
    crossings: list[float] = field(default_factory=list[float])
    reconnects: list[float] = field(default_factory=list[float])
    pauses: list[float] = field(default_factory=list[float])
    calm: list[float] = field(default_factory=list[float])
    over: bool = False

    def take(self, data: bytes) -> None:
        """Note what came, and when."""
        self.seen.append(data)
        if b'"n":' in data:
            self.arrivals.append(time.perf_counter())
        self.over = self.over or DONE in b"".join(self.seen[-2:])

    def stay(self, client: Gapless, conn: Conn, seconds: float) -> bool:
        """Read for a while, to the end of a block: that is the cursor. Whether more will come."""
        until = time.perf_counter() + seconds
        while not self.over and (
            time.perf_counter() < until or not self.seen[-1].endswith((b"\n\n", b"\n\n\r\n"))
        ):
            self.take(conn.recv())
        client.cursor = last_id(b"".join(self.seen[-20:])) or client.cursor
        return not self.over

    def longest_since(self, begun: float, *, before: int = 0) -> float:
        """The longest time between two events after `begun`, and the last so many before it."""
        after = next((i for i, at in enumerate(self.arrivals) if at > begun), len(self.arrivals))
        times = self.arrivals[max(0, after - before) :]
        return max((late - early for early, late in pairwise(times)), default=0.0)


def crossing(bench: Bench) -> list[Figure]:
    """Crossings ÷ reconnects, and the pause; then the same where no commit waits for a disk."""
    options = ("--max-upgrades-per-minute", "1000000")
    with (
        bench.gapless(options=options) as durable,
        bench.gapless(options=options, log="memory") as fleeting,
        bench.floor() as floor,
        bench.directory() as directory,
        bench.asked("log.py", str(directory / "log.db")) as log,
    ):
        servers = {"full": durable, "memory": fleeting}
        journeys: dict[str, list[Journey]] = {kind: [] for kind in servers}
        for server in servers.values():
            _travel(server)
        _bare(floor)
        least: list[float] = []
        for _ in range(bench.rounds):
            for kind, server in servers.items():
                journeys[kind].append(_travel(server))
            least.append(_bare(floor) + log(f"wait {MOVES}") / 2)
    count = sum(len(journey.crossings) for each in journeys.values() for journey in each)
    bench.note(f"{count} crossings, no event lost")
    as_many, added, *pauses = _figures(journeys["full"], "", 2.5, 1, 2, 20)
    alone = _in_ms("uvicorn's part of that, and a commit: the least there could be", None, least)
    return [as_many, added, alone, *pauses, *_figures(journeys["memory"], ", log in memory")]


def _bare(floor: Server) -> float:
    """Seconds that a handshake takes longer than an event stream does, in uvicorn alone."""
    client, took = Gapless(floor.port, FLOOR), dict[str, list[float]](stream=[], socket=[])
    for _ in range(MOVES):
        for name, open in (("stream", client.listen), ("socket", client.upgrade)):
            begun = time.perf_counter()
            conn = open()
            took[name].append(time.perf_counter() - begun)
            conn.close()
    return median(took["socket"]) - median(took["stream"])


def _figures(
    journeys: list[Journey],
    log: str,
    as_many: float | None = None,
    added: float | None = None,
    p50: float | None = None,
    p99: float | None = None,
) -> list[Figure]:
    crossings = [median(journey.crossings) for journey in journeys]
    reconnects = [median(journey.reconnects) for journey in journeys]
    both = [a - b for a, b in zip(crossings, reconnects, strict=True)]
    what = f"a crossing ÷ an SSE reconnect, p50{log}"
    return [
        ratio(what, crossings, reconnects, as_many, "at most", milliseconds),
        _in_ms(f"added time, p50{log}", added, both),
        _in_ms(f"longest pause, p50{log}", p50, [median(journey.pauses) for journey in journeys]),
        _in_ms(f"longest pause, p99{log}", p99, [percentile(journey.pauses, 0.99) for journey in journeys]),
        _in_ms(f"the same without a move, p50{log}", None, [median(journey.calm) for journey in journeys]),
    ]


def _in_ms(what: str, target: float | None, seconds: list[float]) -> Figure:
    return Figure(what, target, "at most", tuple(1e3 * value for value in seconds), "ms")


def _travel(server: Server) -> Journey:
    """One stream of events, read on one wire after the other."""
    journey = Journey()
    client = Gapless(server.port)
    client.initialize()
    wire = client.listen()
    client.call("tick", count=EVENTS, every=EVERY)
    while journey.stay(client, wire, STAY):
        begun = time.perf_counter()
        wire.close()
        wire = client.listen()
        live = time.perf_counter()
        journey.reconnects.append(live - begun)
        if not journey.stay(client, wire, STAY):
            break
        journey.calm.append(journey.longest_since(live))
        begun = time.perf_counter()
        socket = client.upgrade()
        journey.crossings.append(time.perf_counter() - begun)
        wire.close()
        wire = socket
        journey.stay(client, wire, STAY)
        journey.pauses.append(journey.longest_since(begun, before=1))
        wire.close()
        wire = client.listen()
    check(b"".join(journey.seen), EVENTS)
    wire.close()
    client.close()
    return journey
