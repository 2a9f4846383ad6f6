"""The oracle: a climb of numbered rungs, each a message, and the account of what arrived of them.

Any server that offers the tools `ladder` and `runs` can be judged; `examples/ladder_server.py` has
them for the official SDK.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, cast

import msgspec

__all__ = [
    "INITIALIZE",
    "INITIALIZED",
    "Account",
    "Climb",
    "Kind",
    "Ledger",
    "as_object",
    "ranges",
    "runs_request",
]

INITIALIZE: Final[dict[str, Any]] = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {"elicitation": {}},
        "clientInfo": {"name": "gapless-torture", "version": "0"},
    },
}
"""The request that every session begins with."""

INITIALIZED: Final[dict[str, Any]] = {"jsonrpc": "2.0", "method": "notifications/initialized"}
"""What follows its answer."""


class Kind(Enum):
    """What a rung is."""

    PROGRESS = "progress"
    LOG = "log"
    ASK = "ask"
    CHANGED = "changed"
    STRAY = "stray"

    @property
    def of_the_call(self) -> bool:
        """Whether it belongs to the call, so that a standard server sends it on the call's stream."""
        return self not in (Kind.CHANGED, Kind.STRAY)


@dataclass(frozen=True, slots=True)
class Climb:
    """One call of the tool `ladder`: `rungs` messages of the `kinds` in turn, `delay` seconds apart.

    `pad` bytes are added to each log message.
    """

    run: str
    rungs: int
    delay: float
    kinds: tuple[Kind, ...] = (Kind.PROGRESS, Kind.LOG)
    pad: int = 0

    def request(self, id: int) -> dict[str, Any]:
        """The call, as a JSON-RPC request."""
        arguments: dict[str, Any] = {
            "run": self.run,
            "rungs": self.rungs,
            "delay": self.delay,
            "kinds": [kind.value for kind in self.kinds],
        }
        if self.pad:
            arguments["pad"] = self.pad
        params = {"name": "ladder", "arguments": arguments, "_meta": {"progressToken": self.run}}
        return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}

    def kind(self, rung: int) -> Kind:
        """What a rung is."""
        return self.kinds[(rung - 1) % len(self.kinds)]


def runs_request(id: int, run: str) -> dict[str, Any]:
    """Asks how many times a climb was begun."""
    params = {"name": "runs", "arguments": {"run": run}}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


@dataclass(slots=True)
class Account:
    """What arrived of one climb.

    Attributes:
        rungs: every rung that arrived, in the order of arrival, repeats and all.
        streams: the stream that each came on; only what one stream carries has an order.
        result: the climb's answer, if it came: its result, or an error.
        answers: how many times an answer came.
        before: how many rungs had arrived by then; `None` if it has not come.
    """

    climb: Climb
    id: int
    rungs: list[int] = field(default_factory=list[int])
    streams: list[int] = field(default_factory=list[int])
    result: dict[str, Any] | None = None
    answers: int = 0
    before: int | None = None
    _answered_on: int = 0

    def take(self, message: dict[str, Any], stream: int) -> int | None:
        """Count a message if it is of this climb; which rung it is, if it is one."""
        if message.get("id") == self.id and "method" not in message:
            self.answers += 1
            if self.result is None:
                self.result, self.before, self._answered_on = message, len(self.rungs), stream
        rung = self._rung(message)
        if rung is not None:
            self.rungs.append(rung)
            self.streams.append(stream)
        return rung

    def _rung(self, message: dict[str, Any]) -> int | None:
        run, rung = _named(message)
        if run != self.climb.run or isinstance(rung, bool) or not isinstance(rung, int | float):
            return None
        return int(rung) if 1 <= rung <= self.climb.rungs and rung % 1 == 0 else None

    # What it comes to ---------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the climb came to its own end: not an error, and every question answered once."""
        if self.result is None or "result" not in self.result:
            return False
        try:
            text = msgspec.json.decode(self.result["result"]["content"][0]["text"], type=dict[str, Any])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            return False
        climb = self.climb
        asked = [rung for rung in range(1, climb.rungs + 1) if climb.kind(rung) is Kind.ASK]
        return text == {"run": climb.run, "rungs": climb.rungs, "answers": asked}

    @property
    def missing(self) -> list[int]:
        """Rungs that never arrived."""
        arrived = set(self.rungs)
        return [rung for rung in range(1, self.climb.rungs + 1) if rung not in arrived]

    @property
    def repeated(self) -> list[int]:
        """Rungs that arrived more than once, as often as they did so; a second answer is rung 0."""
        seen: set[int] = set()
        again: list[int] = []
        for rung in self.rungs:
            if rung in seen:
                again.append(rung)
            seen.add(rung)
        return again + [0] * max(0, self.answers - 1)

    @property
    def reordered(self) -> list[int]:
        """Rungs that arrived, for the first time, after a later one of the same stream."""
        last: dict[int, int] = {}
        late: list[int] = []
        seen: set[int] = set()
        for rung, stream in zip(self.rungs, self.streams, strict=True):
            if rung in seen:
                continue
            seen.add(rung)
            if rung < last.get(stream, 0):
                late.append(rung)
            last[stream] = max(rung, last.get(stream, 0))
        return late

    @property
    def late(self) -> list[int]:
        """Rungs that arrived, for the first time, after the answer, on its own stream."""
        if self.before is None:
            return []
        after = zip(self.rungs[self.before :], self.streams[self.before :], strict=True)
        earlier = set(self.rungs[: self.before])
        return [rung for rung, stream in after if stream == self._answered_on and rung not in earlier]

    @property
    def outcome_unknown(self) -> bool:
        """Whether the answer says that nobody knows what came of the call."""
        error = as_object((self.result or {}).get("error"))
        return error.get("code") == -32000 and as_object(error.get("data")).get("reason") == "outcome-unknown"

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to come."""
        return self.result is not None and not self.missing


def _named(message: dict[str, Any]) -> tuple[Any, Any]:
    """The run and the rung that a message names, whatever they are."""
    params = as_object(message.get("params"))
    match message.get("method"):
        case "notifications/progress":
            return params.get("progressToken"), params.get("progress")
        case "notifications/message":
            data = as_object(params.get("data"))
            return data.get("run"), data.get("rung")
        case "notifications/tools/list_changed":
            meta = as_object(params.get("_meta"))
            return meta.get("run"), meta.get("rung")
        case "elicitation/create":
            run, _, text = str(params.get("message", "")).rpartition(" ")
            return run, int(text) if text.isdecimal() and len(text) < 10 else None
        case _:
            return None, None


def as_object(value: Any) -> dict[str, Any]:
    """A value as an object, an empty one if it is none: servers send what they like."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


class Ledger:
    """The accounts of one session, how many messages it has received, and how many of them were rungs."""

    def __init__(self) -> None:
        self.accounts: list[Account] = []
        self.count = 0
        self.rungs = 0
        self._named: defaultdict[str | int, list[Account]] = defaultdict(list)

    def start(self, climb: Climb, id: int) -> Account:
        """An account for a climb that is about to begin."""
        account = Account(climb, id)
        self.accounts.append(account)
        for name in (climb.run, id):
            self._named[name].append(account)
        return account

    def take(self, message: dict[str, Any], stream: int = 0) -> dict[str, Any] | None:
        """Count a message that came on a stream; the reply that it wants, if it is a request."""
        self.count += 1
        name = _named(message)[0] if "method" in message else message.get("id")
        accounts = self._named.get(name, []) if isinstance(name, str | int) else []
        rungs = [account.take(message, stream) for account in accounts]
        self.rungs += len([rung for rung in rungs if rung is not None])
        if "method" not in message or "id" not in message:
            return None
        rung = next((rung for rung in rungs if rung is not None), None)
        result = {} if rung is None else {"action": "accept", "content": {"rung": rung}}
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return all(account.complete for account in self.accounts)

    @property
    def answered(self) -> bool:
        """Whether every call has an answer, be it an error."""
        return all(account.result is not None for account in self.accounts)


def ranges(numbers: list[int]) -> str:
    """Numbers as a person writes them: `3–5, 9`."""
    parts: list[str] = []
    for number in sorted(set(numbers)):
        if parts and number == int(parts[-1].rpartition("–")[2]) + 1:
            parts[-1] = f"{parts[-1].partition('–')[0]}–{number}"
        else:
            parts.append(str(number))
    return ", ".join(parts)
