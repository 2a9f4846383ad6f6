"""A standard MCP client (2025-11-25), which knows nothing of Gapless, as a small pure model.

It POSTs requests and reads the stream that each is answered with; it listens on the standalone stream;
and where a stream breaks or ends early it reconnects with the last ID it has of that stream, if any.
It is not a machine of ours: the model is what the stream view (§7) may expect of others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.refusal import Reason
from tests.explore.client import request
from tests.explore.parts import Item, Violation

__all__ = ["Standard", "Standards", "Stream"]

ASKED, OPEN, IDLE, DONE, LOST = "asked", "open", "idle", "done", "lost"


class Stream(NamedTuple):
    """One stream as the client knows it.

    Attributes:
        request: the ID of the request that opened it; 0 for the standalone stream.
        cursor: the last ID that came on it, priming included.
        seen: the events that came on it, by number.
        first: the number that it was first primed with; events up to there are not its business.
    """

    request: int
    state: str
    cursor: str | None = None
    seen: tuple[int, ...] = ()
    first: int | None = None
    answered: bool = False


class Standards:
    """All states of one exploration's standard client, each once."""

    def __init__(self) -> None:
        self.table: dict[Any, Standard] = {}
        self.ended: set[str] = set()

    def start(self) -> tuple[Standard, tuple[Any, ...]]:
        """A client that is initialised, and has asked for the standalone stream."""
        return self.intern((Stream(0, ASKED),)), (("get", 1, None),)

    def intern(self, streams: tuple[Stream, ...]) -> Standard:
        """The one client in this state."""
        found = self.table.get(streams)
        if found is None:
            found = self.table[streams] = Standard(self, len(self.table), streams)
        return found


class Standard:
    """One state of the client. A stream's attempt is its place in `streams`, from 1."""

    name = "client"
    over = False
    hand = None
    reading = True
    full = False
    listens = True
    quiet = True
    process = 1
    renumber = ()

    def __init__(self, standards: Standards, number: int, streams: tuple[Stream, ...]) -> None:
        self.standards = standards
        self.number = number
        self.streams = streams
        self.timers = tuple(at for at, s in enumerate(streams, 1) if s.state is IDLE)
        self.memo: dict[tuple[Any, ...], tuple[Standard, tuple[Any, ...]]] = {}

    def __str__(self) -> str:
        return f"client {[tuple(s) for s in self.streams]}"

    def step(self, *act: Any) -> tuple[Standard, tuple[Any, ...]]:
        """Take one step; return the client after it and what it wants done."""
        found = self.memo.get(act)
        if found is None:
            streams, effects = getattr(self, "_on_" + act[0])(*act[1:])
            found = self.memo[act] = (self.standards.intern(streams), effects)
        return found

    def explain(self, *act: Any) -> list[str]:
        """What it does in this step, for a trace."""
        try:
            return [f"{act} → {self.step(*act)[1]}"]
        except Violation as error:
            return [f"{act}: {error}"]

    def _with(self, attempt: int, **changes: Any) -> tuple[Stream, ...]:
        streams = list(self.streams)
        streams[attempt - 1] = streams[attempt - 1]._replace(**changes)
        return tuple(streams)

    def _on_ask(self) -> Any:
        id = 10 + len(self.streams)
        return (*self.streams, Stream(id, ASKED)), (("mcp", len(self.streams) + 1, request(id)),)

    def _on_tick(self, attempt: int) -> Any:
        """Time to reconnect: with the last ID of this stream."""
        stream = self.streams[attempt - 1]
        return self._with(attempt, state=ASKED), (("get", attempt, stream.cursor),)

    def _on_open(self, attempt: int, _: bool, __: Any) -> Any:
        return self._with(attempt, state=OPEN), ()

    def _on_block(self, attempt: int, item: Item) -> Any:
        stream, block = self.streams[attempt - 1], item.block
        assert block is not None
        if block.id is None:
            return self.streams, ()
        seq = int(block.id.split(".")[0])
        if not block.data:
            first = seq if stream.first is None else stream.first
            return self._with(attempt, cursor=block.id, first=first), ()
        if stream.seen and seq <= stream.seen[-1]:
            raise Violation(f"M2: event {seq} came again on the stream of {stream.request}")
        envelope = peek(block.data)
        answered = stream.answered
        if envelope.kind is Kind.RESPONSE:
            if envelope.id != stream.request or answered:
                raise Violation(f"M1: the response {envelope.id} came on the stream of {stream.request}")
            answered = True
        return self._with(attempt, cursor=block.id, seen=(*stream.seen, seq), answered=answered), ()

    def _on_closed(self, attempt: int, _: bool, __: int) -> Any:
        return self._interrupted(attempt), ()

    def _on_failed(self, attempt: int) -> Any:
        return self._interrupted(attempt), ()

    def _on_quiet(self) -> Any:
        return self.streams, ()

    def _interrupted(self, attempt: int) -> tuple[Stream, ...]:
        stream = self.streams[attempt - 1]
        if stream.answered:
            return self._with(attempt, state=DONE)
        # A POST cannot be repeated, and without an ID its stream cannot be found again.
        return self._with(attempt, state=IDLE if stream.cursor or not stream.request else LOST)

    def _on_answered(self, attempt: int, response: tuple[Any, ...]) -> Any:
        kind, refusal = response
        if kind != "refused" or refusal.reason is not Reason.CURSOR_EVICTED:
            raise Violation(f"§7: a standard client is told {response}")
        self.standards.ended.add(refusal.reason.value)
        return self._with(attempt, state=LOST), ()
