"""The MCP server inside the naive server: the tools `ladder` and `runs`, by hand.

On the wire they are those of `examples/ladder_server.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, Final

from gapless.protocol.jsonrpc import RequestId
from gapless.protocol.revisions import STREAM_VIEW

__all__ = ["Emit", "NaiveLadder"]

Emit = Callable[[dict[str, Any], RequestId | None], None]
"""Takes a message for the client, and the request that it relates to."""

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_TOOLS: Final = [
    {
        "name": "ladder",
        "description": "Climb rung by rung, each a numbered message of the next kind.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "run": _TEXT,
                "rungs": {"type": "integer", "default": 20},
                "delay": {**_NUMBER, "default": 0.01},
                "kinds": {"type": "array", "items": _TEXT, "default": ["progress", "log"]},
                "pad": {"type": "integer", "default": 0},
            },
            "required": ["run"],
        },
    },
    {
        "name": "runs",
        "description": "How many times a climb was begun.",
        "inputSchema": {"type": "object", "properties": {"run": _TEXT}, "required": ["run"]},
    },
]


class NaiveLadder:
    """One session's MCP server. `journal` gets the name of every climb as it begins."""

    def __init__(self, emit: Emit, journal: list[str]) -> None:
        self._emit = emit
        self._journal = journal
        self._calls: dict[RequestId, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: dict[str, Any]) -> None:
        """One message of the client."""
        method, params = message.get("method"), message.get("params") or {}
        if method is None:
            question = self._questions.pop(message.get("id", 0), None)
            if question is not None and not question.done():
                question.set_result(message.get("result") or {})
        elif "id" in message:
            task = self._calls[message["id"]] = asyncio.create_task(
                self._answer(message["id"], method, params)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif method == "notifications/cancelled" and params.get("requestId") in self._calls:
            self._calls.pop(params["requestId"]).cancel()

    def close(self) -> None:
        """Nothing is climbed any more."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, id: RequestId, method: str, params: dict[str, Any]) -> None:
        outcome: dict[str, Any] = {"error": {"code": -32601, "message": f"{method} is not known here"}}
        try:
            result = await self._result(id, method, params)
            if result is not None:
                outcome = {"result": result}
        except (KeyError, TypeError, ValueError) as error:
            outcome = {"error": {"code": -32602, "message": f"{method}: {error!r}"}}
        self._emit({"jsonrpc": "2.0", "id": id, **outcome}, id)

    async def _result(self, id: RequestId, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
        match method, params.get("name"):
            case "initialize", _:
                asked = params.get("protocolVersion")
                return {
                    "protocolVersion": asked if asked in STREAM_VIEW else STREAM_VIEW[-1],
                    "capabilities": {"logging": {}, "tools": {"listChanged": True}},
                    "serverInfo": {"name": "naive", "version": "0"},
                }
            case (("ping" | "logging/setLevel"), _):
                return {}
            case "tools/list", _:
                return {"tools": _TOOLS}
            case "tools/call", "ladder":
                token = (params.get("_meta") or {}).get("progressToken")
                return _text(await self._climb(id, token, **params["arguments"]))
            case "tools/call", "runs":
                return _text(str(self._journal.count(params["arguments"]["run"])))
            case _:
                return None

    async def _climb(
        self,
        id: RequestId,
        token: RequestId | None,
        run: str,
        rungs: int = 20,
        delay: float = 0.01,
        kinds: tuple[str, ...] = ("progress", "log"),
        pad: int = 0,
    ) -> str:
        self._journal.append(run)
        answers: list[int] = []
        for rung, kind in zip(range(1, rungs + 1), itertools.cycle(kinds), strict=False):
            await asyncio.sleep(delay)
            here = {"run": run, "rung": rung}
            log = {
                "level": "info",
                "logger": "ladder",
                "data": {**here, **({"pad": "." * pad} if pad else {})},
            }
            match kind:
                case "progress" if token is not None:
                    report = {"progressToken": token, "progress": rung, "total": rungs, "message": run}
                    self._notify("progress", report, id)
                case "log":
                    self._notify("message", log, id)
                case "stray":
                    self._notify("message", log)
                case "changed":
                    self._notify("tools/list_changed", {"_meta": here})
                case "ask":
                    answer = await self._ask(f"{run} {rung}", id)
                    answers.append(int((answer.get("content") or {}).get("rung", 0)))
                case _:
                    pass
        return json.dumps({"run": run, "rungs": rungs, "answers": answers})

    def _notify(self, what: str, params: dict[str, Any], related: RequestId | None = None) -> None:
        self._emit({"jsonrpc": "2.0", "method": f"notifications/{what}", "params": params}, related)

    async def _ask(self, text: str, related: RequestId) -> dict[str, Any]:
        number = next(self._numbers)
        schema = {"type": "object", "properties": {"rung": {"type": "integer"}}}
        params = {"mode": "form", "message": text, "requestedSchema": schema}
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._emit(
            {"jsonrpc": "2.0", "id": number, "method": "elicitation/create", "params": params}, related
        )
        return await question


def _text(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": False}
