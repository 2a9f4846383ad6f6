"""Row 11: what a session with an open stream holds.

The same object behind the SDK's transport and behind Gapless; each session has done its handshake and holds
the standalone stream open. Counted is resident memory of the process's own, over 400 sessions, after 50 that
warm it up; a fresh server for each figure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.harness import Bench, Figure, Server, ratio
from benchmarks.load import FLOOR, Conn, Gapless, Standard

__all__ = ["session"]

WARM = 50
COUNTED = 400


def session(bench: Bench) -> list[Figure]:
    """Memory per session, SDK ÷ ours."""

    def ours() -> AbstractContextManager[Server]:
        return bench.gapless(backend="object")

    taken: dict[str, list[float]] = {"sdk": [], "object": [], "idle": [], "least": []}
    for _ in range(bench.rounds):
        taken["sdk"].append(_held(bench.sdk, _standard))
        taken["object"].append(_held(ours, _standard))
        taken["idle"].append(_held(ours, _idle))
        taken["least"].append(_alone(bench) + _held(bench.floor, _bare))
    return [
        ratio("the same object in process", taken["sdk"], taken["object"], 4, "at least", kibibytes),
        ratio(
            "the object without a transport, and a stream of uvicorn: the most there could be",
            taken["sdk"],
            taken["least"],
            None,
            "at least",
            kibibytes,
        ),
        ratio(
            "ours of the session view, before its first message",
            taken["sdk"],
            taken["idle"],
            None,
            "at least",
            kibibytes,
        ),
    ]


def _held(serve: Callable[[], AbstractContextManager[Server]], open: Callable[[int], Conn]) -> float:
    with serve() as server:
        held = [open(server.port) for _ in range(WARM)]
        before = server.memory()
        held += [open(server.port) for _ in range(COUNTED)]
        each = (server.memory() - before) / COUNTED
        for conn in held:
            conn.close()
    return each


def _alone(bench: Bench) -> float:
    with bench.asked("alone.py", "sessions") as alone:
        alone(f"{WARM}")
        return alone(f"{COUNTED}")


def _bare(port: int) -> Conn:
    return Gapless(port, FLOOR).listen()


def _standard(port: int) -> Conn:
    client = Standard(port)
    stream = client.listen()
    client.asker.close()
    return stream


def _idle(port: int) -> Conn:
    client = Gapless(port)
    stream = client.listen()
    client.asker.close()
    return stream


def kibibytes(value: float) -> str:
    """For people."""
    return f"{value / 1024:.1f} KiB"
