"""The fuzz targets by name. Each takes bytes, and only what `gapless.errors` documents may come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tests.fuzz import answers, arrivals, bodies, decoder, event_id, frames, refusals

__all__ = ["TARGETS", "Target"]


class Target(NamedTuple):
    """What is called, what to begin with, and how many inputs are worth a test's time."""

    call: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    inputs: int


TARGETS: Final = {
    "decoder": Target(decoder.target, decoder.SEEDS, 1500),
    "event_id": Target(event_id.target, event_id.SEEDS, 3000),
    "frames": Target(frames.target, frames.SEEDS, 200),
    "bodies": Target(bodies.target, bodies.SEEDS, 600),
    "refusals": Target(refusals.target, refusals.SEEDS, 1500),
    "answers": Target(answers.target, answers.SEEDS, 400),
    "arrivals": Target(arrivals.target, arrivals.SEEDS, 1500),
}
