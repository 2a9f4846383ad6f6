"""The server's machine in the stream view, in long random runs beside a naive model (§7)."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from gapless.protocol.cursor import START, EventId, Link, Position
from gapless.protocol.delivery import ConnectionId, Delivery
from gapless.protocol.inputs import Accepted, Listen
from gapless.protocol.refusal import CLOSE_EVICTED, CLOSE_NORMAL, Reason
from gapless.protocol.session import Session, View
from gapless.server.intake import message_input
from tests.fuzz.examples import examples
from tests.protocol.stateful import TEXTS, Conn, Request, decode, json_line
from tests.protocol.stateful_backend import REQUESTS, Backed

_PRIMES: Final = 8
"""Positions of a stream that can be proven below the floor."""


class StreamView(Backed):
    """Standard MCP: a stream for each request, and the standalone one."""

    view = View.STREAM

    def open_session(self) -> None:
        super().open_session()
        self.streams = 1
        self.primes: dict[int, dict[int, None]] = {}
        self.questions: set[int] = set()
        """Events of the standalone stream that are requests to the client."""
        self.places: list[EventId] = []
        """What clients have: the IDs that came on a connection."""

    def start(self, how: int) -> None:
        """A handshake, a request under way, the standalone stream, or several of these; a restart."""
        if how & 4:
            self.shake_hands(how)
        if how & 1:
            self.a_message_comes("token", "hello", True)
        if how & 2:
            self.somebody_listens("none", 0, True)
        if how >= 6:
            self.the_backend_speaks("question", 1, "hello")
            self.client_says("reply" if how == 6 else "request")
            self.flush()
            self.process_dies(landed=True)
            self.the_next_backend_begins()

    def client_says(self, kind: str) -> None:
        self.a_message_comes(kind, "", True)

    @property
    def running(self) -> set[int]:
        """The streams that may go on: the standalone one, and those of open requests."""
        return {0, *(request.stream for request in self.open.values())}

    # The backend ----------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["note", "related", "settled", "progress", "question", "question", "result", "error"]
        ),
        count=st.integers(1, 5),
        text=TEXTS,
    )
    def the_backend_speaks(self, what: str, count: int, text: str) -> None:
        if what in ("result", "error"):
            self.answer_request(text, count, fails=what == "error")
            return
        for _ in range(1 if what == "question" else count):
            n = self.next()
            said: dict[str, Any] = {"method": "notifications/message", "params": {"data": text, "n": n}}
            related = None
            match what:
                case "related" if self.open:
                    related = list(self.open)[n % len(self.open)]
                case "settled":
                    related = "settled long ago"
                case "progress":
                    tokens = [r.token for r in self.open.values() if r.token is not None]
                    token = [*tokens, "nobody's"][n % (len(tokens) + 1)]
                    params = {"progressToken": token, "progress": n, "message": text}
                    said = {"method": "notifications/progress", "params": params}
                case "question":
                    said = self.question(text)
                case _:
                    pass
            stream = self.route(said, related)
            if what == "question" and self.hears:
                self.asked[self.mark(said["id"])] = len(self.log) + 1
                self.questions |= {len(self.log) + 1} if stream == 0 else set()
            self.emit(said, stream, related)

    def route(self, said: dict[str, Any], related: Any) -> int:
        """M1: the backend's word; else the token; else, if nobody listens, the oldest open request."""
        if related is not None:
            return self.open[related].stream if related in self.open else 0
        if said["method"] == "notifications/progress":
            token = said["params"]["progressToken"]
            return next((r.stream for r in self.open.values() if r.token == token), 0)
        if any(c.stream == 0 for c in self.conns.values()):
            return 0
        return next((request.stream for request in self.open.values()), 0)

    def withdrawn_on(self) -> int:
        """M1: it relates to no request."""
        return self.route({"method": "notifications/cancelled"}, None)

    # Messages -------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(
            ["request"] * 3
            + ["token", "token", "same id", "note", "cancel", "reply", "reply", "late reply"]
            + ["handshake", "initialized", "level", "listen"]
        ),
        text=TEXTS,
        primed=st.booleans(),
    )
    def a_message_comes(self, kind: str, text: str, primed: bool) -> None:
        id: Any = self.next()
        method, params = REQUESTS.get(kind, REQUESTS["request"])
        params = params | {"text": text}
        message: dict[str, Any] = {"id": id, "method": method, "params": params}
        match kind:
            case "token":
                params["_meta"] = {"progressToken": f"p{id}"}
            case "same id" if self.open:
                message["id"] = next(iter(self.open))
            case "note":
                message = {"method": "notifications/roots/list_changed"}
            case "cancel":
                params = {"requestId": next(iter(self.open), id), "reason": text}
                message = {"method": "notifications/cancelled", "params": params}
            case "initialized":
                message = {"method": "notifications/initialized"}
            case "reply" | "late reply":
                asked = [*self.dead, *(self.asked if kind == "reply" else ())]
                message = {"id": asked[-1], "result": {"text": text}}
            case _:
                pass
        self.take(message, params, primed)

    def take(self, message: dict[str, Any], params: dict[str, Any], primed: bool) -> None:
        """One POST: a request gets a stream of its own, anything else is taken (M1, M5, M6)."""
        data = json_line(message)
        conn = self.connection()
        input = message_input(data, self.limits.max_message_bytes, answer_on=conn, primed=primed)
        if input.problem is not None:
            return  # refused before the machine is asked
        if self.over is not None:
            self.refuses(self.put(input), self.over)
            return
        self.seen_at = self.now
        id, method = message.get("id"), message.get("method")
        if method is not None and id in self.open:
            self.refuses(self.put(input), Reason.DUPLICATE_ID)
            return
        number = len(self.messages) + 1
        self.messages.append((data, data))
        self.waiting.append(number)
        if method is not None and id is not None:
            stream, at = self.streams, len(self.log)
            self.streams += 1
            self.open[id] = Request(number, stream, method, params.get("_meta", {}).get("progressToken"))
            given = self.hand_over()
            self.prime(stream, at, primed)
            effects = self.put(input)
            assert effects[:-1] == given
            self.serving(self.served(effects, conn), conn, stream, at, primed)
            return
        if method == "notifications/cancelled" and params["requestId"] in self.open:
            del self.open[params["requestId"]]
        elif method is None:
            self.asked.pop(id, None)
        given = self.hand_over()
        assert self.put(input) == [*given, Accepted(number)]

    # Event streams --------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["place"] * 4 + ["open"] * 3 + ["none"] * 3 + ["any", "any", "start", "foreign", "ahead"]
        ),
        n=st.integers(0, 40),
        primed=st.booleans(),
    )
    def somebody_listens(self, what: str, n: int, primed: bool) -> None:
        conn = self.connection()
        if what == "none":
            self.listen_blindly(conn, primed)
            return
        stated = self.position(what, n)
        input = Listen(conn, self.stating(stated), primed=primed)
        refused = self.over or self.unproven_on_stream(stated)
        if refused is not None:
            self.refuses(self.put(input), refused)
            return
        self.ack(stated.stream, stated.seq)
        at = self.floor if stated is START else stated.seq
        self.prime(stated.stream, at, primed)
        self.serving(self.served(self.put(input), conn), conn, stated.stream, at, primed)

    def position(self, what: str, n: int) -> Position:
        """What somebody states: an ID that came (`place`; of an `open` request), any event's, or worse."""
        stream, seq = n % (self.streams + 1), max(0, self.committed - n)
        match what:
            case "open" if any(place.stream in self.running for place in self.places):
                places = [place for place in self.places if place.stream in self.running]
                return places[n % len(places)]
            case "place" if self.places:
                return self.places[-1 - n % len(self.places)]
            case "foreign" if self.places:
                place = self.places[-1 - n % len(self.places)]
                return EventId(place.seq, place.stream, Link(bytes(b ^ 1 for b in place.link)))
            case "ahead":
                return EventId(self.committed + 1 + n, 0, Link(bytes(8)))
            case "any":
                return EventId(seq, stream, self.link_at(seq))
            case _:
                return START

    def unproven_on_stream(self, stated: Position) -> Reason | None:
        """C5, asked of the events of one stream (M4)."""
        if stated.stream >= self.streams:
            return Reason.MALFORMED
        if stated.seq >= self.floor:
            return self.unproven(stated)
        last = self.gone.get(stated.stream, 0)
        known = stated.seq in self.primes.get(stated.stream, {}) or stated.seq == last > 0
        if last > stated.seq or not (known or stated is START):
            return Reason.CURSOR_EVICTED
        if isinstance(stated, EventId) and stated.link != self.link_at(stated.seq):
            return Reason.CURSOR_FOREIGN
        return None

    def listen_blindly(self, conn: ConnectionId, primed: bool) -> None:
        """M3: the standalone stream, from what was acknowledged of it, less what was answered."""
        at = max(self.acks.get(0, 0), self.floor)
        input = Listen(conn, None, self.stating(EventId(at, 0, self.link_at(at))).held, primed=primed)
        if self.over is not None:
            self.refuses(self.put(input), self.over)
            return
        skip = frozenset(self.questions - set(self.asked.values()))
        self.prime(0, at, primed)
        delivery = self.served(self.put(input), conn)
        assert {s for s in delivery.skip if s > self.floor} == {s for s in skip if s > self.floor}
        self.serving(delivery, conn, 0, at, primed, skip)

    def prime(self, stream: int, at: int, primed: bool) -> None:
        """A position that a connection is primed with can be proven from then on (M4)."""
        if primed:
            primes = self.primes.setdefault(stream, {})
            primes[at] = None
            for old in list(primes)[:-_PRIMES]:
                del primes[old]

    def serving(
        self,
        delivery: Delivery,
        id: ConnectionId,
        stream: int,
        at: int,
        primed: bool,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        """A connection of this stream: it supersedes the one before (M3)."""
        assert delivery.opening == EventId(at, stream, self.link_at(at)), "C6: where it starts from"
        for other in self.conns.values():
            if other.stream == stream:
                other.close = CLOSE_NORMAL
        self.conns[id] = Conn(delivery, at, stream, skip=skip, primed=primed)

    @precondition(lambda self: self.writing)
    @rule(n=st.integers(0, 9), most=st.integers(1, 9))
    def a_client_reads_on_and_reconnects(self, n: int, most: int) -> None:
        """The ordinary client: what it has read, it states when its connection breaks (M2)."""
        self.flush()
        conn = self.writing[n % len(self.writing)]
        for _ in range(3):
            if conn.delivery.connection in self.conns:
                self.write(conn, most)
        if conn.delivery.connection in self.conns:
            self.drop(conn)
        self.somebody_listens("place", 0, True)

    # Connections ----------------------------------------------------------------------------------

    def write(self, conn: Conn, most: int) -> None:
        before = conn.at
        super().write(conn, most)
        if conn.at > before:
            assert conn.stream is not None
            self.places.append(EventId(conn.at, conn.stream, self.link_at(conn.at)))

    def may_end(self, conn: Conn, code: int) -> bool:
        if conn.close is not None:
            return code == conn.close
        unread = range(conn.delivery.position + 1, self.floor + 1)
        if any(self.log[seq - 1].stream == conn.stream for seq in unread):
            return code == CLOSE_EVICTED
        done = self.over is not None or conn.stream not in self.running
        return code == CLOSE_NORMAL and done and self.following(conn) is None

    def told(self, conn: Conn, control: bytes) -> None:
        blocks = decode(control)
        if not conn.opened and conn.close is None and conn.primed and blocks:
            prime = blocks.pop(0)
            assert prime.id == str(conn.delivery.opening)
            assert (prime.data, prime.retry) == (b"", self.limits.retry * 1000)
            self.places.append(conn.delivery.opening)
            conn.opened = True
        for block in blocks:
            assert (block.id, block.data, block.retry) == (None, None, 30_000), "M3: stay away"
            assert conn.close is not None

    # Restarts -------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        running = sorted(self.running)
        return super().summary() | {
            "streams": self.streams,
            "questions": {seq for seq in self.questions if seq > self.floor},
            "primes": {stream: dict(self.primes[stream]) for stream in running if self.primes.get(stream)},
            "gone": {stream: self.gone[stream] for stream in running if stream in self.gone},
        }

    def found(self, session: Session) -> dict[str, Any]:
        streams, evicted = session.streams, session.outbox.evicted
        running = sorted({0, *streams.running})
        return super().found(session) | {
            "streams": streams.next,
            "questions": set(streams.questions),
            "primes": {s: dict.fromkeys(streams.primes(s)) for s in running if streams.primes(s)},
            "gone": {stream: evicted[stream][0] for stream in running if stream in evicted},
        }


@pytest.mark.hypothesis
@pytest.mark.rule("L1", "L4", "L7", "C5", "C6", "M1", "M2", "M3", "M4", "M6", "N1", "N2", "N3")
def test_a_long_life_in_the_stream_view_is_as_a_naive_model_has_it() -> None:
    long = settings(max_examples=examples(0.8), stateful_step_count=40)
    run_state_machine_as_test(StreamView, settings=long)
