"""Row 7: how long a caller waits for `tools/call`.

One call after another on one connection, in standard MCP: the SDK's server with its store in memory, against
Gapless. A call of ours is two commits one after the other, that of the request (it must be durable before it
runs, for it runs at most once) and that of its answer. Told besides is the most that the ratio could be:
uvicorn passing the messages on to the same process, with nothing in between; and that, and two such commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from benchmarks.harness import Bench, Figure, Server, ratio
from benchmarks.load import Standard

__all__ = ["call", "p50", "waiting"]

CALLS = 300


def call(bench: Bench) -> list[Figure]:
    """A tool that does nothing."""
    with ExitStack() as stack:
        servers = {
            "sdk": stack.enter_context(bench.sdk()),
            "full": stack.enter_context(bench.gapless()),
            "memory": stack.enter_context(bench.gapless(log="memory")),
            "full object": stack.enter_context(bench.gapless(backend="object")),
            "memory object": stack.enter_context(bench.gapless(backend="object", log="memory")),
            "floor": stack.enter_context(bench.floor()),
        }
        file = stack.enter_context(bench.directory()) / "log.db"
        log = stack.enter_context(bench.asked("log.py", str(file)))
        measures = {name: p50(server) for name, server in servers.items()}
        taken = bench.take({**measures, "log": lambda: log(f"wait {CALLS}")})
    sdk, floor = taken["sdk"], taken["floor"]
    most = "uvicorn before the same process, and nothing else: the most there could be"
    synced = [call + commits for call, commits in zip(floor, taken["log"], strict=True)]
    return [
        ratio("FULL, stdio backend", sdk, taken["full"], 1.3, "at least", milliseconds),
        ratio("memory, stdio backend", sdk, taken["memory"], 5, "at least", milliseconds),
        ratio(most, sdk, floor, None, "at least", milliseconds),
        ratio("that, and two commits", sdk, synced, None, "at least", milliseconds),
        ratio("FULL, SDK object in process", sdk, taken["full object"], None, "at least", milliseconds),
        ratio("memory, SDK object in process", sdk, taken["memory object"], None, "at least", milliseconds),
    ]


def p50(server: Server) -> Callable[[], float]:
    """The median of so many calls' seconds."""
    client = Standard(server.port)

    def measure() -> float:
        return median(waiting(client, CALLS))

    return measure


def waiting(client: Standard, calls: int) -> list[float]:
    """What each of so many calls took."""
    taken: list[float] = []
    for _ in range(calls):
        begun = time.perf_counter()
        client.call("echo", text="x")
        taken.append(time.perf_counter() - begun)
    return taken


def milliseconds(value: float) -> str:
    """For people."""
    return f"{value * 1e3:.2f} ms"
