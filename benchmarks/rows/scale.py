"""Row 12: whether it stays as fast with many sessions and many events.

CPU per event of one call × 1,000 notifications, and the p50 of `tools/call`, in a server with 5,000 sessions
whose event streams are open, against one with a single session; and in a session whose log holds a million
events, against one with a thousand. Then 10,000 sessions on a log, the server killed, and started again: the
time from its start until one of them is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter

from benchmarks.harness import Bench, Figure, Server, gapless, ratio
from benchmarks.load import Conn, Gapless, burst, check, request
from benchmarks.rows.emit import emitting, microseconds
from benchmarks.rows.latency import milliseconds, p50

__all__ = ["flat"]

SESSIONS = 5_000
EVENTS = (1_000, 1_000_000)
RESTARTED = 10_000
PART = 50_000
MANY = ("--max-sessions", "20000", "--max-children", "20000", "--max-connections", "12000")
KEEP = ("--retain-events", "4000000", "--retain-bytes", str(2**31))


def flat(bench: Bench) -> list[Figure]:
    """Many ÷ few."""
    share = 10 if bench.quick else 1
    return [
        *_sessions(bench, SESSIONS // share),
        *_events(bench, EVENTS[1] // share),
        _restart(bench, RESTARTED // share),
    ]


def _sessions(bench: Bench, count: int) -> list[Figure]:
    with bench.gapless() as few, bench.gapless(options=MANY) as many:
        held = [_open(many.port) for _ in range(count - 1)]
        cost = bench.take({"many": emitting(many, 1, 20), "few": emitting(few, 1, 20)})
        wait = bench.take({"many": p50(many), "few": p50(few)})
        for conn in held:
            conn.close()
    what = f"{count:,} sessions ÷ 1"
    return [
        ratio(f"{what}: CPU per event", cost["many"], cost["few"], 1.25, "at most", microseconds),
        ratio(f"{what}: `tools/call`, p50", wait["many"], wait["few"], 1.25, "at most", milliseconds),
    ]


def _open(port: int) -> Conn:
    client = Gapless(port)
    stream = client.listen()
    client.asker.close()
    return stream


def _events(bench: Bench, most: int) -> list[Figure]:
    with ExitStack() as stack:
        few, many = (stack.enter_context(bench.gapless(options=KEEP)) for _ in range(2))
        read = {"many": _filled(many, most), "few": _filled(few, EVENTS[0])}
        cost = bench.take(read)
    what = f"{most:,} events retained ÷ {EVENTS[0]:,}"
    return [ratio(f"{what}: CPU per event", cost["many"], cost["few"], 1.25, "at most", microseconds)]


def _filled(server: Server, events: int) -> Callable[[], float]:
    """Fill one session's log without acknowledging anything; the CPU seconds per event of what comes then."""
    client = Gapless(server.port)
    client.initialize()
    conn = client.listen()
    for _ in range(max(1, events // PART)):
        burst(client, conn, min(PART, events))

    def measure() -> float:
        def work() -> list[bytes]:
            return [burst(client, conn, 1000) for _ in range(20)]

        spent, arrived = server.spent(work)
        for data in arrived:
            check(data, 1000)
        return spent / (1000 * len(arrived))

    return measure


def _restart(bench: Bench, count: int) -> Figure:
    taken: list[float] = []
    with bench.directory() as directory:
        url = f"sqlite:///{directory / 'gapless.db'}"

        def command(port: int) -> Sequence[str]:
            return gapless(port, url, "stdio", MANY)

        with bench.serving(command) as server:
            clients = _many(server.port, count)
            server.process.kill()
        for _ in range(min(3, bench.rounds)):
            begun = perf_counter()
            with bench.serving(command) as server:
                client = clients[count // 2]
                client.port = server.port
                client.listen().close()
                taken.append(perf_counter() - begun)
                server.process.kill()
    return Figure(f"start with {count:,} sessions until one is served", 2, "at most", tuple(taken), "s")


def _many(port: int, count: int) -> list[Gapless]:
    """So many sessions, asked for 50 at a time."""
    asking = request("POST", "/mcp/session", port, {})
    conns = [Conn(port) for _ in range(50)]
    made: list[Gapless] = []
    while len(made) < count:
        for conn in conns:
            conn.send(asking)
        for conn in conns:
            status, _, body = conn.answer()
            assert status == 201, body
            made.append(Gapless(port, opened=body))
    for conn in conns:
        conn.close()
    return made
