"""A world: servers, clients, their network and disk, and a seeded course of things that go wrong."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Final

import apsw
import pytest

from gapless.client import transport
from gapless.log import database, sqlite
from gapless.server import relay
from tests.simulation.clocks import reproducible
from tests.simulation.disk import Disk
from tests.simulation.ledger import Ledger
from tests.simulation.loop import Loop, SimulationError, current
from tests.simulation.network import Listener, Network
from tests.simulation.node import Node
from tests.simulation.person import Person, WatchedDriver
from tests.simulation.plan import Plan
from tests.simulation.trace import Trace

__all__ = ["Failure", "World", "simulate"]

_AT: Final = ("127.0.0.1", 8000)
_SWEEPS: Final = 130.0
"""Seconds that the sessions of dead processes may take besides: a server looks for them each minute."""
_PATIENCE: Final = 150.0
"""Seconds after the last fault within which every client is through, or told why not (§11.5)."""


class Failure(Exception):
    """A run that went wrong; says how to repeat it."""


class World:
    """One run.

    Attributes:
        happened: what went wrong and what was gone through, and how often.
    """

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan = plan
        self.random = Random(f"world {plan.seed}")
        self.loop = Loop(Random(f"loop {plan.seed}"))
        self.trace = Trace(self.loop)
        self.happened: Counter[str] = Counter()
        self.ledger = Ledger(self.wrong)
        self.network = Network(self.loop, Random(f"network {plan.seed}"), self.trace)
        self.network.latency, self.network.rough = plan.latency, plan.rough
        self.disk = Disk(self.loop, root, Random(f"disk {plan.seed}"), self.trace)
        self.disk.latency = plan.disk
        self.nodes = [self._node(number) for number in range(plan.nodes)]
        self.persons = [self._person(number, root) for number in range(len(plan.persons))]
        self._quiet = False

    def _node(self, number: int) -> Node:
        random = Random(f"node {number} {self.plan.seed}")
        name = f"server{number}"
        return Node(
            name, self.network, self.disk, self.ledger, random, self.wrong, at=_AT, limits=self.plan.limits
        )

    def _person(self, number: int, root: Path) -> Person:
        plan = self.plan.persons[number]
        return Person(
            f"client{number}",
            self.network,
            Random(f"person {number} {self.plan.seed}"),
            self.ledger,
            self.wrong,
            url=f"http://{_AT[0]}:{_AT[1]}/mcp",
            state=root / f"client{number}.json",
            policy=plan.policy,
            steps=plan.steps,
            calls=plan.made(),
            leaves=plan.leaves,
            observe=self._ended,
        )

    def wrong(self, what: str) -> None:
        """Something that must not be: the run ends here."""
        self.trace.note(current(), f"WRONG: {what}")
        self.loop.failures.append({"message": what})

    def _ended(self, person: Person, code: str) -> None:
        """A session has ended for its client: was that to be expected (§11.5)?"""
        self.happened[f"ended {code}"] += 1
        happened, allowed = self.happened, {"left"}
        if person.crashed:
            allowed |= {"message-conflict"}
            if person.steps == 2:
                allowed |= {"session-superseded", "non-resumable-boundary"}
        if self.plan.limits.retain_events < 1000:
            allowed |= {"cursor-evicted"}
        if happened["backend"] or self.plan.limits.on_backend_loss == "supersede":
            allowed |= {"backend-lost"}
        if happened["away"]:
            allowed |= {"session-expired", "session-unknown"}
        if person.steps == 2 and happened["stop"] > 1:
            allowed |= {"upgrade-unavailable"}  # a server that ends answers handshakes with 500 (U6)
        if code not in allowed:
            self.wrong(f"§11.5: {person.name}'s session ended: {code}")

    # The course of things -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Everything, from the first start to the last end."""
        for node in self.nodes:
            node.start()
            await asyncio.sleep(self.random.uniform(0.0, 0.5))
        for person in self.persons:
            person.start()
            await asyncio.sleep(self.random.choice((0.0, 0.5)))
        ends = self.loop.now + self.plan.lasting
        while self.loop.now < ends:
            await asyncio.sleep(self.random.expovariate(1 / self.plan.every))
            fault = self.random.choice(self.plan.faults)
            if getattr(self, f"_{fault}")():
                self.happened[fault] += 1
        await self._heal()
        await self.through()
        await self.forgotten()
        await self.stopped()
        self.tally()

    def tally(self) -> None:
        """Count what was gone through."""
        self.happened["bound"] += sum(person.bound for person in self.persons)
        self.happened["restarts"] += sum(node.starts - 1 for node in self.nodes)
        self.happened["takeovers"] += sum(max(0, a.fence) for a in self.ledger.accounts.values())

    async def _heal(self) -> None:
        """From now on nothing goes wrong."""
        self.trace.note("world", "heals")
        self.network.rough = 0.0
        self.disk.full = self.disk.broken = False
        self.disk.doomed = None
        for one in (*self.nodes, *self.persons):
            one.process.doomed = None
        await asyncio.sleep(10.0)  # for what is down to come up, who is away to come back
        for connection in self.network.connections:
            if connection.open and (connection.client.muted or connection.server.muted):
                connection.reset()

    async def through(self) -> None:
        """§11.5: within a bounded time everybody has all there is, or was told why not."""
        ends = self.loop.now + _PATIENCE
        while not all(person.done for person in self.persons):
            await asyncio.sleep(1.0)
            if self.loop.now > ends:
                late = ", ".join(f"{p.name} ({p.stands()})" for p in self.persons if not p.done)
                self.wrong(f"§11.5: not through after {_PATIENCE:.0f} s: {late}")
        self.trace.note("world", "everybody is through")

    async def forgotten(self) -> None:
        """B4, B9: in the end every session is over, and then forgotten."""
        limits = self.plan.limits
        ends = self.loop.now + 2 * limits.session_expiry + 2 * limits.tombstone + _SWEEPS
        while not all(account.removed for account in self.ledger.accounts.values()):
            await asyncio.sleep(1.0)
            if self.loop.now > ends:
                kept = next(account for account in self.ledger.accounts.values() if not account.removed)
                ended = "" if kept.ended else "nor even "
                self.wrong(f"B4: session {kept.name} is not forgotten, {ended}ended")

    async def stopped(self) -> None:
        """Every server ends when it is asked to, and leaves nothing behind; every request is settled."""
        for node in self.nodes:
            node.retire()
        while any(node.process.alive for node in self.nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        for account in self.ledger.accounts.values():
            self.ledger.settled(account)

    # What goes wrong ------------------------------------------------------------------------------------

    def _connection(self) -> Any:
        there = [c for c in self.network.connections if c.open and not c.local]
        return self.random.choice(there) if there else None

    def _break(self, how: Callable[[Any], object]) -> bool:
        connection = self._connection()
        if connection is not None:
            how(connection)
        return connection is not None

    def _reset(self) -> bool:
        return self._break(lambda c: c.reset())

    def _half(self) -> bool:
        return self._break(lambda c: self.random.choice((c.reset_client, c.reset_server))())

    def _mute(self) -> bool:
        return self._break(lambda c: self.random.choice((c.mute, c.deafen))())

    def _silence(self) -> bool:
        return self._break(lambda c: c.silence())

    def _hold(self) -> bool:
        return self._break(lambda c: c.hold(self.random.choice((0.2, 2.0, 8.0))))

    def _up(self) -> Node | None:
        up = [node for node in self.nodes if node.up and not node.stopping]
        return self.random.choice(up) if up else None

    def _kill(self) -> bool:
        node = self._up()
        if node is not None:
            node.kill(self.random.choice((0.05, 0.5, 3.0)), self._soon())
        return node is not None

    def _power(self) -> bool:
        """The machine dies, and all servers with it."""
        if self.network.is_dark(_AT[0]):
            return False
        self.network.darken(_AT[0])
        for node in self.nodes:
            node.lose_power()
        self.loop.schedule(self.loop.now + self.random.choice((0.1, 1.0, 6.0)), self._boot)
        return True

    def _boot(self) -> None:
        self.disk.crash()
        self.network.lighten(_AT[0])
        for node in self.nodes:
            node.start()

    def _stop(self) -> bool:
        node = self._up()
        if node is not None:
            node.stop(self.random.choice((0.05, 0.5)))
        return node is not None

    def _stall(self) -> bool:
        node = self._up()
        if node is not None:
            node.process.stall(self.random.choice((0.3, 2.0, 8.0)))
        return node is not None

    def _full(self) -> bool:
        return self._fail("full")

    def _broken(self) -> bool:
        return self._fail("broken")

    def _fail(self, how: str) -> bool:
        setattr(self.disk, how, True)
        after = self.loop.now + self.random.choice((0.05, 0.5, 3.0))
        self.loop.schedule(after, setattr, self.disk, how, False)
        return True

    def _doom(self) -> bool:
        """A server dies in the middle of what it does to the disk."""
        self.disk.doomed = self.disk.operations + self.random.randrange(1, 30)
        return True

    def _crash(self) -> bool:
        return self._kill_person(self.random.choice((0.05, 0.5, 3.0)))

    def _away(self) -> bool:
        """A client is gone for longer than sessions live without one."""
        return self.random.random() < 0.1 and self._kill_person(self.plan.limits.session_expiry + 15.0)

    def _kill_person(self, pause: float) -> bool:
        living = [person for person in self.persons if person.process.alive and not person.done]
        if not living:
            return False
        self.random.choice(living).kill(pause, self._soon())
        return True

    def _soon(self) -> int:
        """Callbacks until a process dies: in the middle of something, if it is about to do something."""
        return self.random.choice((0, self.random.randrange(1, 60)))

    def _backend(self) -> bool:
        running = [tools for node in self.nodes if node.up for tools in node.bench.running]
        if not running:
            return False
        tools = self.random.choice(running)
        tools.process.spawn(tools.die())
        return True

    def _move(self) -> bool:
        """An application asks for the WebSocket, whatever its policy."""
        for person in self.persons:
            if person.process.alive and person.connection is not None and self.random.random() < 0.5:
                person.process.context.copy().run(person.connection.migrate)
        return True

    def _slow(self) -> bool:
        """The disk takes its time, for a while."""
        self.disk.latency = (0.2, 1.0)
        self.loop.schedule(self.loop.now + 2.0, setattr, self.disk, "latency", self.plan.disk)
        return True


class _Complaints(logging.Handler):
    """What is logged with an exception, or by a library as an error, is a failure."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = current()
        if not process.alive:
            return
        self._world.trace.note(process, f"logs {record.levelname} {record.getMessage()[:200]}")
        ours = record.name.startswith("gapless")
        # The command does not listen to uvicorn any more once it has told connections to go.
        stopping = any(node.stopping and node.process is process for node in self._world.nodes)
        if (ours and record.exc_info) or (record.levelno >= logging.ERROR and not ours and not stopping):
            self._world.wrong(f"logged: {self.format(record)}")


def _prepare(world: World, stack: ExitStack) -> None:
    """Put the simulated world in the place of the real one."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.chdir(world.disk.root)
    patch.setattr(transport, "Driver", WatchedDriver)
    patch.setattr(sqlite, "inline", world.disk.threads)
    patch.setattr(database, "_BUSY_MS", 0)  # to wait for a lock would not free it

    def bind(near: str | None) -> tuple[Listener, str]:
        address = f"{near}-{world.random.randbytes(4).hex()}.sock"
        return Listener(world.network, address, current(), asyncio.Protocol), address

    patch.setattr(relay, "_bind", bind)
    patch.setattr(relay, "_remove", world.network.forget)
    patch.setattr(apsw, "connection_hooks", [lambda db: db.wal_autocheckpoint(world.plan.checkpoint)])
    handler = _Complaints(world)
    for name in ("gapless", "uvicorn", "asyncio", "websockets", "httpx2"):
        logger = logging.getLogger(name)
        patch.setattr(logger, "propagate", False)
        patch.setattr(logger, "level", logging.WARNING)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)


def simulate(plan: Plan, root: Path, kind: Callable[[Plan, Path], World] | None = None) -> World:
    """Run a plan, in a world of some kind.

    Raises:
        Failure: something was not as it must be.
    """
    world = (kind or World)(plan, root)
    loop = world.loop
    with ExitStack() as stack:
        stack.enter_context(reproducible(loop, Random(f"secrets {plan.seed}")))
        _prepare(world, stack)
        try:
            loop.run_until_complete(loop.create_task(world.run(), context=loop.nobody.context))
        except Exception as error:
            told = str(error) if isinstance(error, SimulationError) else f"{type(error).__name__}: {error}"
            raise Failure(f"seed {plan.seed}: {told}\n{plan}\n{world.trace.tail()}") from error
        finally:
            world.disk.unmount()
            loop.close()
            for person in world.persons:
                person.release()
    return world
