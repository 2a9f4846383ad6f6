"""One course of things, in which one thing dies, once, at a point that is given.

A point is a callback of a process, after which it dies, or something done to the disk, which its process
does not live to see. Every effect of the core and every operation of the log begins and ends in callbacks
of its own, so a death after each callback is one between any two of them: before and after a commit, a
bind, the 101, a replay, an ack, a supersession, an eviction, a hand-over. The schema is made there as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from gapless.protocol.settings import Limits
from tests.simulation.loop import Process
from tests.simulation.plan import PersonPlan, Plan
from tests.simulation.world import Failure, World, simulate

__all__ = ["Victim", "points", "strike"]

Victim = Literal["server", "owner", "machine", "disk", "client"]
"""What dies: a server that is alone, one of two, the machine, a server in the middle of a write, a client."""

_PAUSES: Final = (0.05, 0.5, 3.0)


def _call(run: str, steps: int, **more: Any) -> dict[str, Any]:
    quiet = {"pause": 0.1, "asks": (), "after": 0.0, "waits": False, "cancels": None, "pad": 0}
    return {"run": run, "steps": steps, **quiet, **more}


_PERSONS: Final = (
    PersonPlan(
        "auto",
        2,
        leaves=True,
        calls=(
            _call("a", 4, asks=(2,)),
            _call("b", 20, pause=0.01, pad=200, waits=True),
            _call("c", 6, cancels=0.3),
            _call("d", 2, after=0.5),
        ),
    ),
    PersonPlan("auto", 1, leaves=True, calls=(_call("e", 6, asks=(5,)), _call("f", 2, after=1.5))),
)


def course(nodes: int) -> Plan:
    """What happens each time: two clients, the door, questions, retention, connections that break."""
    limits = Limits(
        keepalive=2.0,
        ack_window=2.0,
        upgrade_window=3.0,
        probe_timeout=0.3,
        session_expiry=45.0,
        tombstone=45.0,
        lease=3.0,
        retain_events=32,
        on_backend_loss="restart",
    )
    return Plan(
        seed=nodes,
        nodes=nodes,
        persons=_PERSONS,
        limits=limits,
        faults=("reset",),
        every=1.0,
        lasting=3.0,
        rough=0.0,
        latency=(0.001, 0.01),
        disk=(0.001, 0.01),
        checkpoint=4,
    )


class Struck(World):
    """A world in which one thing dies, once, at a point that is given.

    Attributes:
        points: how many there were.
    """

    victim: Victim = "server"
    point = 0

    async def run(self) -> None:
        for node in self.nodes:
            node.start()
        for person in self.persons:
            person.start()
        self._doom_it()
        for at, how in ((0.8, "reset"), (1.3, "reset_client"), (1.9, "reset_client"), (2.4, "reset_server")):
            self.loop.schedule(at, self._cut, how)
        await self.through()
        self.points = self.disk.operations if self.victim == "disk" else self._process.steps
        await self.forgotten()
        await self.stopped()
        self.tally()

    def _doom_it(self) -> None:
        owner: Any = self.persons[0] if self.victim == "client" else self.nodes[0]
        self._process: Process = owner.process
        if not self.point:
            return
        owner.pause = _PAUSES[self.point % len(_PAUSES)]
        if self.victim == "disk":
            self.disk.doomed = self.point
            return
        self._process.doomed = self.point
        if self.victim == "machine":
            self._process.ends.insert(0, self._power)

    def _cut(self, how: str) -> None:
        for connection in [c for c in self.network.connections if c.open and not c.local]:
            getattr(connection, how)()


def _run(victim: Victim, point: int) -> Struck:
    kind = type(Struck.__name__, (Struck,), {"victim": victim, "point": point})
    with TemporaryDirectory() as root:
        try:
            world = simulate(course(2 if victim == "owner" else 1), Path(root), kind)
        except Failure as failure:
            raise Failure(f"{victim}, point {point}: {failure}") from None
    assert isinstance(world, Struck)
    return world


def strike(victim: Victim, point: int) -> Counter[str]:
    """Run the course, and let something die on the way; what happened.

    Raises:
        Failure: something was not as it must be.
    """
    return _run(victim, point).happened + Counter(points=1)


def points(victim: Victim) -> int:
    """How many points there are, if nothing dies."""
    world = _run(victim, 0)
    assert not world.happened["restarts"]
    assert world.happened["bound"] >= 2, "the course goes through the door"
    return world.points
