"""What a seed stands for: who is there, under which limits, and what may go wrong how often."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal

from gapless.protocol.client import Policy
from gapless.protocol.settings import Limits
from tests.simulation.person import Call

__all__ = ["FAULTS", "SHORT", "PersonPlan", "Plan"]

SHORT: Final = 60
"""Seeds that `make test` runs."""

FAULTS: Final = (
    "reset", "half", "mute", "silence", "hold",
    "kill", "power", "stop", "stall", "full", "broken", "doom",
    "crash", "away", "backend", "move", "slow",
)  # fmt: skip
"""All that may go wrong. `test_simulation` sees to it that each does."""


@dataclass(frozen=True)
class PersonPlan:
    """One client."""

    policy: Policy
    steps: Literal[1, 2]
    leaves: bool
    calls: tuple[dict[str, Any], ...]

    def made(self) -> list[Call]:
        """Its calls, fresh."""
        return [Call(**call) for call in self.calls]


@dataclass(frozen=True)
class Plan:
    """A run's circumstances, drawn from its seed.

    Attributes:
        faults: what goes wrong; `every` is how many seconds there are between two, `lasting` how long
            they go on.
        rough: how likely a connection is to come to a bad end by itself.
    """

    seed: int
    nodes: int
    persons: tuple[PersonPlan, ...]
    limits: Limits
    faults: tuple[str, ...]
    every: float
    lasting: float
    rough: float
    latency: tuple[float, float]
    disk: tuple[float, float]
    checkpoint: int

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The plan of a seed."""
        random = Random(f"plan {seed}")
        limits = Limits(
            keepalive=random.choice((2.0, 5.0)),
            ack_window=random.choice((2.0, 5.0)),
            upgrade_window=random.choice((3.0, 10.0)),
            probe_timeout=random.choice((0.3, 1.0)),
            session_expiry=45.0,
            tombstone=45.0,
            lease=random.choice((3.0, 6.0)),
            retain_events=random.choice((100_000, 100_000, 100_000, 128, 64)),
            on_backend_loss=random.choice(("restart", "restart", "restart", "supersede")),
        )
        return cls(
            seed=seed,
            nodes=random.choice((1, 1, 2)),
            persons=tuple(_person(random, seed, n) for n in range(random.choice((1, 1, 2, 3)))),
            limits=limits,
            faults=tuple(random.sample(FAULTS, random.randrange(1, 7))),
            every=random.choice((0.5, 1.5, 4.0)),
            lasting=random.choice((6.0, 12.0, 25.0)),
            rough=random.choice((0.0, 0.1, 0.3)),
            latency=random.choice(((0.0002, 0.002), (0.001, 0.03), (0.02, 0.15))),
            disk=random.choice(((0.0001, 0.002), (0.001, 0.02), (0.02, 0.2))),
            checkpoint=random.choice((4, 20, 1000)),
        )


def _person(random: Random, seed: int, number: int) -> PersonPlan:
    calls: list[dict[str, Any]] = []
    curious = random.choice((0.0, 0.1, 0.5))
    for call in range(random.randrange(2, 7)):
        steps = random.choice((0, 1, 3, 6, 15))
        asks = tuple(step for step in range(1, steps + 1) if random.random() < curious)
        calls.append(
            {
                "run": f"{seed}.{number}.{call}",
                "steps": steps,
                "pause": random.choice((0.0, 0.05, 0.3, 1.0)),
                "asks": asks,
                "after": random.choice((0.0, 0.2, 1.0, 3.0)),
                "waits": random.random() < 0.6,
                "cancels": random.choice((0.0, 0.5)) if random.random() < 0.1 else None,
                "pad": random.choice((0, 0, 0, 500, 20_000)),
            }
        )
    policy: Policy = random.choice(("auto", "auto", "auto", "never", "require"))
    return PersonPlan(policy, random.choice((1, 2)), random.random() < 0.8, tuple(calls))
