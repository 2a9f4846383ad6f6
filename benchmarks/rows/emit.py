"""Rows 1 and 2: what an event costs a server that emits as fast as it can.

One call that emits 1,000 notifications of 300 bytes, in one session and in 50 at once: the official SDK's
server with an event store in memory, against Gapless on SQLite with `synchronous=FULL`, before a stdio
server whose lines are ready and before the very object that the SDK serves. All are asked by the same
client, in standard MCP. CPU is the server process's own; the stdio server's is not in it. Told besides:
Gapless with its log in memory, whose ratio no durable log could exceed; and the object without any
transport, which is the most that the ratio in process could be.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from benchmarks.harness import Bench, Figure, Server, ratio
from benchmarks.load import Standard, check, gather

__all__ = ["emitting", "fifty", "microseconds", "one"]

EVENTS = 1000


def one(bench: Bench) -> list[Figure]:
    """Row 1: one session."""
    return _compare(bench, sessions=1, calls=5 if bench.quick else 20)


def fifty(bench: Bench) -> list[Figure]:
    """Row 2: 50 calls in 50 sessions, all at once."""
    return _compare(bench, sessions=10 if bench.quick else 50, calls=1)


def _compare(bench: Bench, *, sessions: int, calls: int) -> list[Figure]:
    with (
        bench.sdk() as sdk,
        bench.gapless(backend="stdio") as stdio,
        bench.gapless(backend="object") as object_,
        bench.gapless(log="memory") as fleeting,
        bench.asked("alone.py", "events") as alone,
    ):
        taken = bench.take(
            {
                "sdk": emitting(sdk, sessions, calls),
                "stdio": emitting(stdio, sessions, calls),
                "object": emitting(object_, sessions, calls),
                "memory": emitting(fleeting, sessions, calls),
                "alone": lambda: alone(f"{20 * EVENTS}"),
            }
        )
    sdk = taken["sdk"]
    durable = "the same, log in memory: the most that a better log could give"
    most = "the object without a transport: the most there could be"
    return [
        ratio("stdio backend", sdk, taken["stdio"], 20, "at least", microseconds),
        ratio(durable, sdk, taken["memory"], None, "at least", microseconds),
        ratio("SDK object in process", sdk, taken["object"], 6, "at least", microseconds),
        ratio(most, sdk, taken["alone"], None, "at least", microseconds),
    ]


def emitting(server: Server, sessions: int, calls: int) -> Callable[[], float]:
    """The server's CPU seconds for each event of so many calls at once."""
    clients = [Standard(server.port) for _ in range(sessions)]

    def measure() -> float:
        spent, arrived = server.spent(lambda: [gather(clients, EVENTS) for _ in range(calls)])
        for data in chain.from_iterable(arrived):
            check(data, EVENTS)
        return spent / (EVENTS * calls * sessions)

    return measure


def microseconds(value: float) -> str:
    """For people."""
    return f"{value * 1e6:.2f} µs"
