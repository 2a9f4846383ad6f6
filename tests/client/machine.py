"""Drives the client machine by hand: a clock, a chain of events, and short names for inputs."""

from __future__ import annotations

from typing import Any

import msgspec

from gapless.protocol.block import Block
from gapless.protocol.client import Client, Phase
from gapless.protocol.cursor import EventId, Link, link_after
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import (
    Arrived,
    Delivered,
    Effect,
    Input,
    Opened,
    SocketOpened,
    Start,
    StreamOpened,
    Submit,
    Tick,
)

__all__ = ["LINK0", "Hand", "event_data"]

LINK0 = Link(bytes(range(8)))


def event_data(n: int) -> bytes:
    """A notification's JSON text, different for each `n`."""
    return msgspec.json.encode({"jsonrpc": "2.0", "method": "notifications/n", "params": {"n": n}})


class Hand:
    """A machine, a clock, and the log that a server would have."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.now = 0.0
        self.effects: list[Effect] = []
        self.seen: list[bytes] = []
        self._ids = [EventId(0, 0, LINK0)]
        self._blocks: list[Block] = []

    def put(self, input: Input) -> list[Effect]:
        """One input; what came of it, which is also kept in `effects`."""
        out = self.client.handle(input, self.now)
        self.effects += out
        return out

    def last(self, kind: type[Any]) -> Any:
        """The latest effect of a kind."""
        return next(effect for effect in reversed(self.effects) if isinstance(effect, kind))

    def tick(self) -> list[Effect]:
        """Let the clock reach what the machine waits for."""
        deadline = self.client.deadline
        assert deadline is not None, "the machine waits for nothing"
        self.now = max(self.now, deadline)
        return self.put(Tick())

    def emit(self, data: bytes, event: str = "message") -> Block:
        """The next event of the log."""
        before = self._ids[-1]
        id = EventId(before.seq + 1, 0, link_after(before.link, 0, event, data))
        self._ids.append(id)
        self._blocks.append(Block(event, str(id), data))
        return self._blocks[-1]

    def id(self, seq: int) -> EventId:
        """The ID of an event of the log."""
        return self._ids[seq]

    def open(self) -> None:
        """Open the session and an event stream, primed."""
        self.put(Start())
        self.put(Opened(self.client.attempt, "token", self._ids[0], {"message": 1000}, {"keepalive": 15}))
        self.listen()

    def listen(self) -> None:
        """Answer the GET that is under way, and prime the stream."""
        assert self.client.phase is Phase.LISTENING
        self.put(StreamOpened(self.client.attempt))
        stated = self.client.incoming.stated
        self.arrive(Block(id=str(stated), data=b"", retry=0))
        self.arrive(Block("received", data=b'{"received":%d}' % self.client.outgoing.received))

    def bind(self, committed: int, cursor: int | None = None) -> list[Effect]:
        """Answer the handshake that is under way, with an echo in both places."""
        assert self.client.phase is Phase.KNOCKING
        out = self.put(SocketOpened(self.client.attempt, committed))
        return out + self.arrive(self.echo(committed, cursor))

    def echo(self, committed: int, cursor: int | None = None) -> Block:
        """The control block that opens a socket."""
        stated = self.client.incoming.stated if cursor is None else self.id(cursor)
        body = {"cursor": committed, "from": str(stated), "received": self.client.outgoing.received}
        return Block("resume-cursor", data=msgspec.json.encode(body))

    def arrive(self, block: Block | None, *more: Block) -> list[Effect]:
        """A block arrives on the connection in use, and maybe others right behind it."""
        attempt = self.client.socket if self.client.socket is not None else self.client.stream
        assert attempt is not None
        return self.put(Arrived(attempt, block, more))

    def take(self) -> bytes | None:
        """The application takes an event and accepts it; `None` if there is none."""
        event = self.client.take()
        if event is None:
            return None
        if self.client.wanted(event):
            self.seen.append(event.data)
        self.put(Delivered())
        return event.data

    def submit(self, message: dict[str, Any]) -> list[Effect]:
        """The application sends a message."""
        data = msgspec.json.encode({"jsonrpc": "2.0", **message})
        return self.put(Submit(data, peek(data)))
