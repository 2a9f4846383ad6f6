"""Clients: somebody with calls to make, the real transport, and a process that may die under it.

What the application receives, and what the client's machine takes for processed, is checked as it comes:
against what is durable, against the state file, and against itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import anyio
import msgspec
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

import gapless
from gapless.client.driver import Driver
from gapless.client.state import Saved
from gapless.client.transport import Connection
from gapless.protocol.client import Phase, Policy, Retry
from gapless.protocol.cursor import EventId, parse_event_id
from gapless.protocol.moves import (
    Arrived,
    Delivered,
    Effect,
    Get,
    Input,
    Knock,
    Negotiate,
    PostAck,
    Received,
    Send,
    Submit,
)
from tests.simulation.ledger import RUN, Ledger, key_of
from tests.simulation.loop import Process
from tests.simulation.network import Network

__all__ = ["Call", "Person", "WatchedDriver"]

_RETRY = Retry(first=0.1, most=3.0, attempts=60, door_first=0.5, door_most=5.0)


@dataclass(slots=True)
class Call:
    """A call to make, and what came of it in the process that made it.

    Attributes:
        after: seconds to wait before it is made, once the one before has been made.
        waits: whether the next one waits for its answer.
        cancels: seconds after which it is cancelled, if it is.
    """

    run: str
    steps: int
    pause: float
    asks: tuple[int, ...]
    after: float
    waits: bool
    cancels: float | None
    pad: int = 0
    made: bool = False
    seen: list[int] = field(default_factory=list[int])
    answer: dict[str, Any] | None = None

    def request(self, id: int) -> dict[str, Any]:
        """As a JSON-RPC request."""
        arguments = {key: getattr(self, key) for key in ("run", "steps", "pause", "asks", "pad")}
        return {"id": id, "method": "tools/call", "params": {"name": "climb", "arguments": arguments}}


class WatchedDriver(Driver):
    """The real driver, with what it is told, and what it states, under watch."""

    person: Person

    def put(self, input: Input) -> None:
        self.person.before(self, input)
        super().put(input)
        self.person.processed(self)
        self.person.stir()

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        self.person.stated(self, effect)


class Person:
    """One client over all its processes and sessions.

    Attributes:
        done: whether all its calls are made and answered, and its last session is left.
        ends: how its sessions ended, by code.
        crashed: whether its present session has outlived a process.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        random: Random,
        ledger: Ledger,
        wrong: Callable[[str], None],
        *,
        url: str,
        state: Path,
        policy: Policy,
        steps: Literal[1, 2],
        calls: list[Call],
        leaves: bool,
        observe: Callable[[Person, str], None],
    ) -> None:
        self.name = name
        self.network = network
        self.loop = network.loop
        self.random = random
        self.trace = network.trace
        self.ledger = ledger
        self.wrong = wrong
        self.url = url
        self.state = state
        self.policy: Policy = policy
        self.steps: Literal[1, 2] = steps
        self.calls = calls
        self.leaves = leaves
        self.done = False
        self.pause = 0.0
        self.crashed = False
        self.ends: list[str] = []
        self.process: Process
        self.connection: Connection | None = None
        self.bound = 0
        self._observe = observe
        self._at: EventId | None = None
        self._opened: list[Any] = []
        self._made: dict[int, Call] = {}
        self._submitted: set[str] = set()
        self._replies: set[asyncio.Task[None]] = set()
        self._started = 0
        self._changed = asyncio.Event()

    # Its life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process begins."""
        self._started += 1
        self.process = self.loop.process(f"{self.name}.{self._started}", self.random.randrange(10**6))
        self.process.ends.append(self._ended)
        self.process.spawn(self._live())

    def kill(self, pause: float, steps: int) -> None:
        """The process dies, `steps` callbacks from now; the next one begins after `pause` seconds."""
        self.trace.note(self.name, f"dies after {self.process.steps + steps} steps")
        self.pause = pause
        self.process.doom(steps)

    def _ended(self) -> None:
        self.network.died(self.process, machine=False)
        if not self.done:
            self.crashed = True
            self.loop.schedule(self.loop.now + self.pause, self.start)

    def stands(self) -> str:
        """Where it stands, in words."""
        driver = None if self.connection is None else self.connection._driver
        waits = [call.run for call in self._made.values() if call.answer is None]
        phase = "" if driver is None else f"{driver.machine.phase.value} at {driver.machine.cursor}, "
        return f"{phase}waits for {waits}"

    def release(self) -> None:
        """Close what dead processes left open, which would complain when it is collected."""
        for stream in self._opened:
            stream._closed = True

    async def _live(self) -> None:
        self._made = {}
        while not self.done:
            await self._session()
        self.trace.note(self.name, f"done: {self.ends}")
        left = [task for task in self.loop.tasks(self.process) if task is not asyncio.current_task()]
        if left:
            self.wrong(f"{self.process} ends, and leaves {left[0]!r}")
        self.process.kill()

    async def _session(self) -> None:
        """One session, or as much of it as this process sees."""
        connection = self.connection = gapless.connect(
            self.url,
            upgrade=self.policy,
            steps=self.steps,
            state=self.state,
            retry=_RETRY,
            answer_timeout=3.0,
            trust_env=False,
        )
        self._made = {}
        self._replies = set()
        self._changed = asyncio.Event()
        read, write = await connection.__aenter__()
        self._opened += connection._streams
        driver = connection._driver
        assert isinstance(driver, WatchedDriver)
        driver.person = self
        driver._random = Random(self.random.random())
        saved = connection._saved
        before, self._at = self._at, None if saved is None else parse_event_id(saved.cursor)
        if saved is None:
            self.crashed = False
        elif self._at is not None and self._at.seq > (0 if before is None else before.seq):
            self.wrong(f"C4: {self.name} goes on from {self._at}, and had processed {before}")
        reading = asyncio.create_task(self._read(read, write))
        calling = asyncio.create_task(self._call(write))
        await asyncio.wait({reading, calling}, return_when=asyncio.FIRST_COMPLETED)
        over = reading.done()
        tasks = (reading, calling, *self._replies)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in (reading, calling):
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        if not over and not self.leaves:
            self.trace.note(self.name, "vanishes")
            self.done = True
            self.process.kill()
            await asyncio.sleep(0)
        await connection.__aexit__(None, None, None)
        await self._answered(over)
        code = "left" if connection.error is None else str(connection.error.code)
        self.ends.append(code)
        self._at = None
        self._observe(self, code)
        self.done = all(call.made for call in self.calls)

    async def _answered(self, over: bool) -> None:
        """L7: whatever was called has been answered by the time the session is over."""
        for call in self._made.values():
            if over and call.answer is None and call.cancels is None and call.run in self._submitted:
                self.wrong(f"L7: {self.name}'s session is over, and {call.run} is not answered")

    async def _call(self, write: Any) -> None:
        """Shake hands, make the calls, wait for their answers."""
        handshake = {
            "protocolVersion": "2025-11-25",
            "capabilities": {"elicitation": {}},
            "clientInfo": {"name": self.name, "version": "1"},
        }
        await _send(write, {"id": 0, "method": "initialize", "params": handshake})
        opening = self._made[0] = Call("initialize", 0, 0.0, (), 0.0, True, None)
        await self._until(lambda: opening.answer is not None)
        await _send(write, {"method": "notifications/initialized"})
        id = 0
        for call in self.calls:
            if call.made:
                continue
            await asyncio.sleep(call.after)
            id += 1
            call.made = True
            self._made[id] = call
            self.trace.note(self.name, f"calls {call.run}")
            await _send(write, call.request(id))
            if call.cancels is not None:
                await asyncio.sleep(call.cancels)
                if call.answer is None:
                    call.answer = {}
                    await _send(write, {"method": "notifications/cancelled", "params": {"requestId": id}})
            elif call.waits:
                await self._until(lambda call=call: call.answer is not None)
        await self._until(lambda: all(call.answer is not None for call in self._made.values()))
        await self._until(self._caught_up)

    def _caught_up(self) -> bool:
        """Whether this client has all there is of its session, and its server all that it said."""
        connection = self.connection
        assert connection is not None
        assert connection._driver is not None
        machine = connection._driver.machine
        account = None if machine.session is None else self.ledger.accounts.get(key_of(machine.session))
        if account is None or machine.cursor is None:
            return False
        return machine.cursor.seq == len(account.events) and not machine.outgoing.kept

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def stir(self) -> None:
        """Something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _read(self, read: Any, write: Any) -> None:
        async for item in read:
            if isinstance(item, Exception):
                raise item
            message = item.message.model_dump(by_alias=True, exclude_unset=True, mode="json")
            if "method" in message and "id" in message:
                # As the SDK does: whoever reads must not wait to write.
                task = asyncio.create_task(self._reply(write, message))
                self._replies.add(task)
                task.add_done_callback(self._replies.discard)
            elif "method" in message:
                self._note(message)
            else:
                self._settle(message)
            self.stir()

    async def _reply(self, write: Any, question: dict[str, Any]) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.2, 1.0, 4.0)))
        run, step = question["params"]["message"].split(" ")
        result = {"action": "accept", "content": {"run": run, "step": int(step)}}
        await _send(write, {"id": question["id"], "result": result})

    def _note(self, message: dict[str, Any]) -> None:
        """§11.1 as the application sees it: the steps of a call come in order, each once."""
        data = message["params"].get("data", {}) if message["method"] == "notifications/message" else {}
        call = next((c for c in self._made.values() if c.run == data.get("run")), None)
        if call is None:
            return
        step = data["step"]
        if step != len(call.seen) + 1:
            self.wrong(f"§11.1: {self.name} saw step {step} of {call.run} after {call.seen}")
        call.seen.append(step)

    def _settle(self, message: dict[str, Any]) -> None:
        call = self._made.get(message["id"])
        if call is None or (call.answer is not None and call.cancels is None):
            self.wrong(f"L7: {self.name} has an answer too many: {message}")
            return
        call.answer = message
        result = message.get("result", {}).get("structuredContent")
        if result is not None and (result["run"] != call.run or call.seen != list(range(1, call.steps + 1))):
            self.wrong(f"§11.1: {self.name} saw {call.seen} of {call.run} before {result}")

    # What its driver goes through ---------------------------------------------------------------------

    def before(self, driver: Driver, input: Input) -> None:
        """Something is about to be put into the machine."""
        session = driver.machine.session
        match input:
            case Arrived(_, block, more) if block is not None and session is not None:
                if block.id is not None and block.data:
                    for each in (block, *more):
                        self.ledger.told(session, parse_event_id(str(each.id)))
                elif block.event in ("received", "resume-cursor"):
                    self.ledger.told_received(session, msgspec.json.decode(block.data or b"{}")["received"])
                    self.bound += block.event == "resume-cursor"
            case Submit(data, _) if driver.machine.phase is not Phase.OVER:
                self._submitted |= {run.decode() for run in RUN.findall(data)}
            case Received(_, received) if session is not None:
                self.ledger.told_received(session, received)
            case _:
                pass
        what = type(input).__name__
        if not isinstance(input, Arrived | Delivered):
            self.trace.note(self.process, f"{driver.machine.phase.value}: {str(input)[:150]}")
        else:
            self.trace.note(self.process, what)

    def processed(self, driver: Driver) -> None:
        """§11.1: what is processed is a prefix of the outbox, from the cursor this process began with."""
        at, cursor, session = self._at, driver.machine.cursor, driver.machine.session
        if cursor is None or session is None or cursor.seq == (0 if at is None else at.seq):
            return
        events = self.ledger.accounts[key_of(session)].events
        if cursor.seq != (0 if at is None else at.seq) + 1:
            self.wrong(f"§11.1: {self.name} processed {cursor} after {at}")
        elif cursor.seq > len(events) or events[cursor.seq - 1].id != cursor:
            self.wrong(f"§11.1: {self.name} processed {cursor}, which is not in the log")
        self._at = cursor

    def stated(self, driver: Driver, effect: Effect) -> None:
        """C4: a cursor that is stated is one that was processed, and is on disk."""
        match effect:
            case Get(_, cursor) | Negotiate(_, cursor) | Knock(_, cursor, _) | PostAck(cursor):
                pass
            case Send(_, frame, True):
                cursor = parse_event_id(msgspec.json.decode(frame.split(b"data: ")[1])["cursor"])
            case _:
                return
        self.processed(driver)
        if cursor.seq != (0 if self._at is None else self._at.seq):
            self.wrong(f"C4: {self.name} states {cursor}, and has processed {self._at}")
        if cursor.seq == 0:
            return
        saved = msgspec.json.decode(self.state.read_bytes(), type=Saved) if self.state.exists() else None
        if saved is None or parse_event_id(saved.cursor).seq < cursor.seq:
            self.wrong(f"C4: {self.name} states {cursor} before it is on disk")


async def _send(write: Any, message: dict[str, Any]) -> None:
    data = msgspec.json.encode({"jsonrpc": "2.0", **message})
    try:
        await write.send(SessionMessage(jsonrpc_message_adapter.validate_json(data)))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        await asyncio.Event().wait()  # the session is over, as the reader sees too
