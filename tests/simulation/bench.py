"""The MCP servers behind it all: they do as their calls say, and count what they were handed.

A call says how many steps to report, how long to take, and whether to ask the client something on
the way. What was handed over is counted in the ledger, which survives every process.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gapless.backends.base import Backend, Sink
from gapless.errors import BackendError
from gapless.protocol.jsonrpc import Envelope, peek
from tests.simulation.ledger import Ledger
from tests.simulation.loop import current

__all__ = ["Bench", "Tools"]


class Bench:
    """Opens the MCP servers of one process (a `BackendFactory`).

    Args:
        wrong: called with what must not be.
    """

    spawns = False

    def __init__(self, ledger: Ledger, wrong: Any) -> None:
        self.ledger = ledger
        self.wrong = wrong
        self.running: list[Tools] = []

    async def start(self) -> None:
        pass

    async def open(self, sink: Sink) -> Backend:
        tools = Tools(self, sink)
        self.running.append(tools)
        return tools

    async def close(self) -> None:
        if self.running:
            self.wrong(f"{len(self.running)} MCP servers were not closed")


class Tools(Backend):
    """One session's MCP server: the tool `climb`, and questions."""

    def __init__(self, bench: Bench, sink: Sink) -> None:
        self.process = current()
        self._bench = bench
        self._sink = sink
        self._tasks: dict[Any, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._lock = asyncio.Lock()
        self.closed = False

    async def send(self, data: bytes, envelope: Envelope) -> None:
        assert envelope == peek(data)
        if self.closed:
            raise BackendError("the MCP server is gone")
        message = json.loads(data)
        match message.get("method"):
            case "initialize":
                self._spawn(message["id"], self._result(message["id"], _SERVER))
            case "tools/call":
                arguments = message["params"]["arguments"]
                self._bench.ledger.hand(arguments["run"].encode())
                self._spawn(message["id"], self._climb(message["id"], arguments))
            case "notifications/cancelled":
                task = self._tasks.get(message["params"]["requestId"])
                if task is not None:
                    task.cancel()
            case None:
                question = self._questions.pop(message["id"], None)
                if question is not None and not question.done():
                    question.set_result(message)
            case _:
                pass

    async def close(self) -> None:
        self.closed = True
        if self in self._bench.running:
            self._bench.running.remove(self)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def die(self) -> None:
        """Be gone, as a command that crashes."""
        if self.closed:
            return
        self.closed = True
        self._bench.running.remove(self)
        for task in self._tasks.values():
            task.cancel()
        await self._sink.lost("it crashed")

    def _spawn(self, id: Any, work: Any) -> None:
        task = self._tasks[id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def _say(self, message: dict[str, Any], related: Any = None) -> None:
        async with self._lock:
            data = json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode()
            if not self.closed and current().alive:
                full = self._sink.emit(data, peek(data), related)
                if full is not None:
                    await full

    async def _result(self, id: Any, result: dict[str, Any]) -> None:
        await self._say({"id": id, "result": result}, id)

    async def _climb(self, id: Any, arguments: dict[str, Any]) -> None:
        run, steps, pause = arguments["run"], arguments["steps"], arguments["pause"]
        pad = "x" * arguments.get("pad", 0)
        answers: list[int] = []
        for step in range(1, steps + 1):
            if pause:
                await asyncio.sleep(pause)
            if step in arguments["asks"]:
                answers.append(await self._ask(id, run, step))
            data = {"run": run, "step": step, "pad": pad}
            params = {"level": "info", "logger": "climb", "data": data}
            await self._say({"method": "notifications/message", "params": params}, id)
        done = {"run": run, "steps": steps, "answers": answers}
        await self._result(id, {"content": [], "structuredContent": done})

    async def _ask(self, id: Any, run: str, step: int) -> int:
        """Ask the client; every incarnation numbers its questions from 1."""
        self._asked += 1
        question = self._questions[self._asked] = asyncio.get_running_loop().create_future()
        schema = {"type": "object", "properties": {"step": {"type": "integer"}}}
        params = {"mode": "form", "message": f"{run} {step}", "requestedSchema": schema}
        await self._say({"id": self._asked, "method": "elicitation/create", "params": params}, id)
        answer = await question
        if answer.get("result", {}).get("content") != {"run": run, "step": step}:
            self._bench.wrong(f"N3: question {run} {step} was answered {answer}")
        return step


_SERVER = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {"listChanged": True}, "logging": {}},
    "serverInfo": {"name": "bench", "version": "1"},
}
