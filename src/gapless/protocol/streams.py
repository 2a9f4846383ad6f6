"""The streams of the stream view (M1–M4): which exist, which are finished, where a message goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gapless.protocol.cursor import EventId, Link
from gapless.protocol.inbox import Inbox
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId
from gapless.protocol.outbox import Outbox, Run

__all__ = ["Streams"]

_REMEMBERED: Final = 1024
"""Finished streams that are remembered after all their events are evicted."""
_PRIMES: Final = 8
"""Positions that a stream's newest connections were primed with, kept for their proof."""
_NONE: Final[frozenset[int]] = frozenset()
"""One for all: each empty one would take 216 bytes."""


class Streams:
    """Stream 0 is the standalone one; each request opens the next. In the session view all is stream 0."""

    __slots__ = ("_done", "_gone", "_last", "_primes", "_questions", "_running", "next")

    def __init__(self) -> None:
        self.next = 1
        """The number that the next stream opened gets."""
        self._last: dict[int, int] = {}
        self._running: set[int] = set()
        self._done: list[int] = []
        """Finished streams with events above the floor, in the order of their last events."""
        self._gone: list[int] = []
        """Finished streams all of whose events are evicted."""
        self._primes: dict[int, dict[int, Link]] = {}
        self._questions = _NONE

    def open(self) -> int:
        """The stream of a request that was just POSTed (M1)."""
        stream = self.next
        self.next += 1
        self._running.add(stream)
        return stream

    def resume(
        self, next: int, running: Iterable[int], runs: Iterable[Run], questions: Iterable[int]
    ) -> None:
        """Go on with the streams of a restored session, whose log retains these runs."""
        self.next, self._running = next, set(running)
        self._questions = frozenset(questions)
        for run in runs:
            for stream, (last, _) in run.streams.items():
                self._last[stream] = last
        done = (stream for stream in self._last if stream and stream not in self._running)
        self._done = sorted(done, key=self.last)

    @property
    def running(self) -> frozenset[int]:
        """Streams of requests that are open."""
        return frozenset(self._running)

    @property
    def questions(self) -> frozenset[int]:
        """Events of the standalone stream that are requests to the client (M3)."""
        return self._questions

    def opened(self, stream: int) -> bool:
        """Whether a stream of this number was ever opened (M1)."""
        return stream < self.next

    def note(self, stream: int, seq: int) -> None:
        """Event `seq` went to `stream`."""
        self._last[stream] = seq

    def last(self, stream: int) -> int:
        """The last event of a stream; 0 if it has none."""
        return self._last.get(stream, 0)

    def finish(self, stream: int) -> None:
        """No more events will go to this stream; the standalone one never finishes."""
        if stream in self._running:
            self._running.discard(stream)
            self._done.append(stream)

    def finished(self, stream: int) -> bool:
        """Whether a stream ends once its last event is written (M2)."""
        return stream > 0 and stream not in self._running

    def prime(self, stream: int, here: EventId) -> None:
        """A connection was primed with `here`, which can be proven even below the floor (M4)."""
        primes = self._primes.setdefault(stream, {})
        primes[here.seq] = here.link
        while len(primes) > _PRIMES:
            del primes[next(iter(primes))]

    def primes(self, stream: int) -> dict[int, Link]:
        """The positions that a stream's connections were primed with, and their links."""
        return self._primes.get(stream, {})

    def primed(self, stream: int, seq: int) -> Link | None:
        """The link of a position that a connection of this stream was primed with."""
        return self.primes(stream).get(seq)

    def route(self, inbox: Inbox, envelope: Envelope, related: RequestId | None, listening: bool) -> int:
        """The stream of a message that is no response (M1).

        By the backend's word, else by progress token, else, when nobody listens to the standalone
        stream, to the oldest open request; what relates to a settled request, and the rest, to 0.
        """
        if related is not None:
            request = inbox.open.get(related)
            return 0 if request is None else request.stream
        if envelope.method == "notifications/progress":
            for request in inbox.open.values():
                if request.token is not None and request.token == envelope.token:
                    return request.stream
            return 0
        if not listening:
            for request in inbox.open.values():
                return request.stream
        return 0

    def ask(self, stream: int, envelope: Envelope, seq: int) -> None:
        """Remember a request to the client on the standalone stream: once answered it is history (M3)."""
        if stream == 0 and envelope.kind is Kind.REQUEST:
            self._questions |= {seq}

    def answered(self, inbox: Inbox) -> frozenset[int]:
        """Events that are server→client requests which the client has answered (M3)."""
        return self._questions - frozenset(inbox.asked.values())

    def forget(self, outbox: Outbox) -> None:
        """Drop what the floor has made pointless."""
        if self._questions:
            self._questions = frozenset(seq for seq in self._questions if seq > outbox.floor)
        gone = 0
        while gone < len(self._done) and self.last(self._done[gone]) <= outbox.floor:
            gone += 1
        if not gone:
            return
        self._gone += self._done[:gone]
        del self._done[:gone]
        for stream in self._gone[:-_REMEMBERED]:
            self._last.pop(stream, None)
            self._primes.pop(stream, None)
            outbox.evicted.pop(stream, None)
            outbox.acks.pop(stream, None)
        del self._gone[:-_REMEMBERED]

    def copy(self) -> Streams:
        """An independent copy."""
        other = Streams()
        other.next, other._questions = self.next, self._questions
        other._running = set(self._running)
        other._last = dict(self._last)
        other._done, other._gone = self._done.copy(), self._gone.copy()
        other._primes = {stream: dict(primes) for stream, primes in self._primes.items()}
        return other
