"""Row 5: what a WebSocket costs beside SSE.

Two sessions of the session view in one server, one read as an event stream and one through the door on a
WebSocket: the same events, written at the same moments. The clients acknowledge between the calls.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import Bench, Figure, Server, ratio
from benchmarks.load import Gapless, burst, check
from benchmarks.rows.emit import microseconds

__all__ = ["reading", "socket"]

EVENTS = 20_000


def socket(bench: Bench) -> list[Figure]:
    """WebSocket ÷ SSE."""
    with bench.gapless() as server:
        taken = bench.take({"socket": reading(server, "socket"), "events": reading(server, "events")})
    return [ratio("stdio backend", taken["socket"], taken["events"], 1.1, "at most", microseconds)]


def reading(server: Server, wire: str, events: int = EVENTS) -> Callable[[], float]:
    """The server's CPU seconds for each event read on one wire."""
    client = Gapless(server.port)
    client.initialize()

    def measure() -> float:
        conn = client.upgrade() if wire == "socket" else client.listen()
        spent, data = server.spent(lambda: burst(client, conn, events))
        check(data, events)
        client.ack(data)
        conn.close()
        return spent / events

    return measure
