"""The server's machine in the session view, in long random runs beside a naive model (§3, §6).

`tests/explore` searches every interleaving of a few steps. Here the steps are many, the payloads are
what tools really say, and retention is always about to bite.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from msgspec import structs

from gapless.protocol.block import Block
from gapless.protocol.cursor import START, EventId
from gapless.protocol.delivery import ConnectionId, Medium
from gapless.protocol.inputs import (
    Accepted,
    Acked,
    Cursor,
    Dropped,
    Effect,
    Ending,
    Handshake,
    Known,
    Listen,
    Message,
    Offered,
    Probing,
    Serving,
    Stated,
    Upgrade,
    Verdict,
)
from gapless.protocol.refusal import (
    CLOSE_ACK_WINDOW,
    CLOSE_EVICTED,
    CLOSE_FENCED,
    CLOSE_NORMAL,
    CLOSE_OVER,
    Reason,
)
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Session, View
from gapless.server.intake import message_input
from tests.fuzz.examples import examples
from tests.protocol.stateful import CURSORS, TEXTS, Conn, Request, decode, json_line
from tests.protocol.stateful_backend import REQUESTS, Backed

SSE, PENDING = SessionState.SSE_ACTIVE, SessionState.UPGRADE_ACCEPTED_PENDING
BOUND, OVER = SessionState.WEBSOCKET_BOUND, SessionState.TERMINATED

Question = Listen | Upgrade | Handshake
URL = "/mcp/session/token/events"

MESSAGES = st.sampled_from(
    [
        *("request", "request", "text id", "handshake", "discovery", "level", "listen"),
        *("subscribe", "unsubscribe", "initialized"),
        *("note", "cancel", "reply", "late reply", "progress", "same id"),
        "empty",
        "broken",
        "large",
        "batch",
    ]
)


class SessionView(Backed):
    """One stream of events, a door, numbered messages."""

    view = View.SESSION

    def open_session(self) -> None:
        super().open_session()
        self.state = SSE
        self.event = 0
        self.ticket: str | None = None
        self.shown: set[str] = set()
        self.concluded: set[str] = set()
        self.tickets: list[str] = ["never issued"]
        self.generation = 0
        self.process: str | None = None
        self.retired: set[str] = set()
        self.negotiation = ""
        self.asks: list[tuple[Question, int]] = []

    def start(self, how: int) -> None:
        """An offer, or the boundary; a socket, its gap read or not, or with none; a restart; deaths."""
        if how == 0:
            return
        if how % 2 == 0 or how == 7:
            self.shake_hands(how)
        self.the_backend_speaks("notes", 3, "hello")
        self.a_message_comes("request", "hello", "next", "same", "post")
        self.flush()
        self.somebody_asks("listen", ("here", 0), "none")
        self.read_on(0, 2)
        if how in (1, 2, 5):
            self.somebody_asks("negotiate", ("here", 0), "none")
        if how == 2:
            self.flush()
            self.somebody_asks("listen", ("door", 0), "none")
        if how in (3, 4):
            self.somebody_asks("knock", ("back", 2), "none")
        if how == 3:
            self.flush()
            self.a_message_comes("empty", "", "next", "new", "post")
        if how == 4:
            self.read_on(1, 9)
            self.a_message_comes("request", "hello", "hole", "same", "socket")
        if how == 5:
            self.flush()
            self.somebody_asks("knock", ("door", 0), "current")
        if how == 6:
            self.the_backend_speaks("question", 1, "hello")
            self.client_says("request")
            self.flush()
            self.process_dies(landed=True)
            self.the_next_backend_begins()
        for _ in range(how - 3 if how in (7, 8) else 0):
            if self.over is None:
                self.the_backend_speaks("question", 1, "hello")
                self.backend_dies()
                self.backend_goes_on()

    def client_says(self, kind: str) -> None:
        self.a_message_comes(kind, "", "next", "same", "post")

    # The backend ----------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["notes", "notes", "notes", "question", "taken back", "result", "error"]),
        count=st.integers(1, 8),
        text=TEXTS,
    )
    def the_backend_speaks(self, what: str, count: int, text: str) -> None:
        match what:
            case "notes":
                for _ in range(count):
                    said = {"method": "notifications/message", "params": {"data": text, "n": self.next()}}
                    self.emit(said, 0)
            case "result" | "error":
                self.answer_request(text, count, fails=what == "error")
            case _:
                said = self.question(text)
                id = self.mark(said["id"])
                if self.hears:
                    self.asked[id] = len(self.log) + 1
                self.emit(said, 0)
                if what == "taken back" and self.hears:
                    del self.asked[id]
                    self.emit({"method": "notifications/cancelled", "params": {"requestId": said["id"]}}, 0)

    # Messages -------------------------------------------------------------------------------------

    @rule(
        kind=MESSAGES,
        text=TEXTS,
        number=st.sampled_from(["next"] * 8 + ["again", "again", "other bytes", "hole", "hole", "none"]),
        process=st.sampled_from(["same"] * 14 + ["new", "retired", "none"]),
        way=st.sampled_from(["post", "socket", "socket", "old socket"]),
    )
    def a_message_comes(self, kind: str, text: str, number: str, process: str, way: str) -> None:
        data = self.compose(kind, text)
        n = len(self.messages) + 1
        match number:
            case "again" | "other bytes" if self.messages:
                n = 1 + self.next() % len(self.messages)
                data = self.messages[n - 1][0] if number == "again" else data
            case "hole":
                n += 1 + len(text) % 3
            case _:
                pass
        name = self.process or "process 0"
        if process == "new":
            name = f"process {self.next()}"
        elif process == "retired" and self.retired:
            name = sorted(self.retired)[0]
        conn = self.pick_socket(way)
        known = None
        if n <= len(self.messages):
            self.flush()  # a number that was received is compared with what is durable
            recorded = self.messages[n - 1]
            known = Known(message_input(recorded[0], 1 << 20).digest, not recorded[1])
        input = message_input(
            data,
            self.limits.max_message_bytes,
            number=None if number == "none" else n,
            process=None if process == "none" else name,
            known=known,
            connection=None if conn is None else conn.delivery.connection,
        )
        self.take_message(input, data, conn)

    def compose(self, kind: str, text: str) -> bytes:
        """A message of this kind, as its bytes."""
        id: Any = self.next()
        match kind:
            case "text id":
                id = f"{id}"
            case "same id" if self.open:
                id = next(iter(self.open))
            case "note":
                return json_line({"method": "notifications/roots/list_changed", "params": {"why": text}})
            case "cancel":
                target = next(iter(self.open), id)
                return json_line({"method": "notifications/cancelled", "params": {"requestId": target}})
            case "initialized":
                return json_line({"method": "notifications/initialized"})
            case "reply" | "late reply":
                asked = [*self.dead, *(self.asked if kind == "reply" else ())]
                return json_line({"id": asked[-1], "result": {"text": text}})
            case "progress":
                asked = [*self.dead[-2:], *self.asked]
                params = {"progressToken": asked[id % len(asked)], "progress": 1, "message": text}
                return json_line({"method": "notifications/progress", "params": params})
            case "empty":
                return b""
            case "broken":
                return b'{"jsonrpc":"2.0","id":%d,"method":"m","params":{"x":NaN}}' % id
            case "batch":
                return b"[" + json_line({"id": id, "method": "ping"}) + b"]"
            case "large":
                text = text + "y" * 600
            case _:
                pass
        method, params = REQUESTS.get(kind, REQUESTS["request"])
        line = json_line({"id": id, "method": method, "params": params | {"text": text}})
        return line.replace(b',"method"', b',\n "method"', 1) if len(text) % 2 else line

    def pick_socket(self, way: str) -> Conn | None:
        """The socket that a message or an ack comes on: the one that is bound, or any."""
        sockets = [c for c in self.conns.values() if c.socket and (way == "old socket" or not self.void(c))]
        return None if way == "post" or not sockets else sockets[0]

    def void(self, conn: Conn) -> bool:
        """Whether what comes on this socket is void (B8)."""
        return conn.close is not None or conn.generation != self.generation

    def take_message(self, input: Message, data: bytes, conn: Conn | None) -> None:
        """L6, in the order of §8: ended, process, number, digest; then what the message is."""
        if conn is not None and self.void(conn):
            assert self.put(input) == []
            return
        if self.over is not None:
            self.refuses(self.put(input), self.over)
            return
        self.seen_at = self.now
        received = len(self.messages)
        if input.number is None or input.process is None:
            self.refuse_message(input, conn, Reason.MALFORMED, 0)
        elif input.process in self.retired:
            self.refuse_message(input, conn, Reason.MESSAGE_CONFLICT, 0)
        elif input.number > received + 1:
            if conn is None:
                self.refuse_message(input, conn, Reason.MESSAGE_GAP, 0)
                return
            assert self.put(input) == [Accepted(received)]
            if conn.hole is None or conn.hole[0] != received or self.now - conn.hole[1] >= 1.0:
                conn.hole, conn.resend = (received, self.now), True
        elif input.number <= received:
            text, recorded = self.messages[input.number - 1]
            if data != text and (data or recorded):
                self.refuse_message(input, conn, Reason.MESSAGE_CONFLICT, 0)
                return
            assert self.put(input) == [Accepted(received)]
            if conn is not None:
                conn.restate = True
        else:
            self.take_new(input, data, conn)

    def take_new(self, input: Message, data: bytes, conn: Conn | None) -> None:
        """A new number: it is used, whatever the message is."""
        assert input.process is not None
        number = len(self.messages) + 1
        if self.process not in (None, input.process):
            self.retired.add(self.process)
        self.process = input.process
        if input.problem is not None:
            request = input.problem.request
            self.messages.append((data, b""))
            events: list[tuple[int, object]] = []
            if request is not None and request.id not in self.open:
                events.append((0, ("error", request.id, input.problem.reason)))
            self.refuse_message(input, conn, input.problem.reason, number, *events)
            return
        if not data:
            self.messages.append((data, b""))
            assert self.put(input) == [Accepted(number)]
            return
        body = json.loads(data)
        id, method = body.get("id"), body.get("method")
        if method is not None and id is not None and id in self.open:
            self.messages.append((data, b""))
            self.refuse_message(input, conn, Reason.DUPLICATE_ID, number)
            return
        assert json.loads(input.data) == body
        assert b"\n" not in input.data
        self.messages.append((data, input.data))
        if method is not None and id is not None:
            self.open[id] = Request(number, 0, method, body["params"].get("_meta", {}).get("progressToken"))
        elif method is None:
            self.asked.pop(id, None)
        elif method == "notifications/cancelled":
            self.open.pop(body["params"]["requestId"], None)
        self.waiting.append(number)
        given = self.hand_over()
        assert self.put(input) == [*given, Accepted(number)]

    def refuse_message(
        self, input: Message, conn: Conn | None, reason: Reason, after: int, *events: tuple[int, object]
    ) -> None:
        """Refused; on a socket that is told there, once what it says is durable."""
        self.refuses(self.put(input, *events), reason)
        if conn is not None:
            conn.untold.append((input.number, after, reason))

    # The door -------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["listen"] * 8 + ["listen blindly"] + ["negotiate"] * 3 + ["knock"] * 4),
        cursor=CURSORS,
        known=st.sampled_from(["none", "none", "current", "current", "old"]),
    )
    def somebody_asks(self, what: str, cursor: tuple[str, int], known: str) -> None:
        stated = self.cursor(*cursor)
        match what:
            case "listen" | "listen blindly":
                self.ask(Listen(self.connection(), None if what == "listen blindly" else stated))
            case "negotiate":
                nonces = [*sorted(self.concluded), *sorted(self.shown)] or ["first"]
                nonce = {"old": nonces[0], "current": nonces[-1]}.get(known, f"n{self.next()}")
                self.ask(Upgrade(stated, nonce, f"ticket {self.next()}", URL))
            case _:
                ticket = {"old": self.tickets[0], "current": self.tickets[-1]}.get(known)
                self.ask(Handshake(self.connection(), stated, ticket, f"own {self.next()}", URL))

    def probe_ends(self, n: int) -> None:
        if not self.asks:
            return
        alive = n % 3 > 0
        question, generation = self.asks.pop(n % len(self.asks))
        stated = None if question.cursor is None else question.cursor.stated
        again = structs.replace(question, verdict=Verdict(generation, alive))
        if stated is not None:
            assert again.cursor is not None
            again = structs.replace(again, cursor=self.stating(stated))
        self.ask(again)

    def ask(self, question: Question) -> None:
        """Put a question; what comes of it is what §6 says, in the order of §8."""
        cursor = question.cursor
        if self.over is not None:
            self.refuses(self.put(question), self.over)
            return
        if cursor is None and self.state is not PENDING:
            cursor = self.stating(START)
        unproven = None if cursor is None else self.unproven(cursor.stated)
        if unproven is not None:
            self.refuses(self.put(question), unproven)
            return
        if cursor is not None and not isinstance(question, Listen):
            self.ack(0, cursor.stated.seq)  # before it is judged (C4)
        if self.spent(question):
            self.refuses(self.put(question), Reason.TICKET_SPENT)
            return
        if self.state is BOUND:
            verdict = question.verdict
            if verdict is None or verdict.generation != self.generation:
                (effect,) = self.put(question)
                assert isinstance(effect, Probing)
                assert effect.delivery.generation == self.generation
                self.asks.append((question, self.generation))
                return
            if verdict.alive:
                self.refuses(self.put(question), Reason.WEBSOCKET_BOUND)
                return
            self.unbind(CLOSE_FENCED)
        seq = None if cursor is None else cursor.stated.seq
        match question:
            case Listen():
                self.listen(question, cursor)
            case Upgrade():
                assert seq is not None
                self.upgrade(question, seq)
            case Handshake():
                assert seq is not None
                self.bind(question, seq)

    def spent(self, question: Question) -> bool:
        """Whether it comes with a nonce that is concluded, or a ticket that is not the one on offer (U7)."""
        match question:
            case Upgrade():
                return question.nonce in self.concluded
            case Handshake(ticket=str(ticket)):
                return self.state is not PENDING or ticket != self.ticket
            case _:
                return False

    def unbind(self, code: int) -> None:
        """The binding ends (B7, B8)."""
        self.state, self.event = SSE, 0
        self.seen_at = self.now
        for conn in self.conns.values():
            if conn.socket and conn.close is None:
                conn.close = code

    def listen(self, question: Listen, cursor: Cursor | None) -> None:
        """An event stream: to its end, to `U` (B2), or the burning of the session (B1)."""
        boundary = self.state is PENDING and (cursor is None or cursor.stated.seq >= self.event)
        stop = self.event if self.state is PENDING else None
        events: list[tuple[int, object]] = []
        if boundary:
            events = self.terminated(Reason.SESSION_SUPERSEDED, "non-resumable-boundary")
            self.state, stop = OVER, len(self.log) + len(events)
        if cursor is None:
            (effect,) = self.put(question, *events)
            assert isinstance(effect, Ending)
            (block,) = decode(effect.block)
            assert (block.event, block.id) == ("session-superseded", None)
            assert json.loads(block.data or b"")["reason"] == "non-resumable-boundary"
            return
        self.ack(0, cursor.stated.seq)
        delivery = self.served(self.put(question, *events), question.connection)
        assert delivery.medium is Medium.EVENTS
        self.conns[question.connection] = Conn(delivery, cursor.stated.seq, stop=stop)

    def upgrade(self, question: Upgrade, seq: int) -> None:
        """An offer, the same offer again (U7), or the boundary."""
        if self.state is PENDING and question.nonce not in self.shown and seq >= self.event:
            events = self.terminated(Reason.SESSION_SUPERSEDED, "non-resumable-boundary")
            self.state = OVER
            self.refuses(self.put(question, *events), Reason.SESSION_SUPERSEDED)
            return
        fresh = self.state is SSE
        if not fresh:
            self.pin_gap(seq if self.pin is None else min(seq, self.pin[0]), self.event)
        if fresh:
            self.open_door(seq)
            self.state, self.ticket, self.negotiation = PENDING, question.ticket, question.nonce
            self.tickets.append(question.ticket)
        self.shown.add(question.nonce)
        accepted = "upgrade-accepted", self.negotiation, self.ticket
        effects = self.put(question, *([(0, accepted)] if fresh else []))
        assert effects == [Offered(self.event, self.negotiation, self.ticket, URL)]

    def open_door(self, seq: int) -> None:
        """`U` is the next event: the gap is pinned (L4), every event stream ends there (U10)."""
        self.event = self.door = len(self.log) + 1
        self.pin_gap(seq, self.event)
        for conn in self.conns.values():
            if not conn.socket and conn.stop is None:
                conn.stop = self.event

    def bind(self, question: Handshake, seq: int) -> None:
        """The commit point: in one step with its own `U`, or completing what is pending."""
        events: list[tuple[int, object]] = []
        before = self.state, self.ticket, set(self.shown)
        if self.state is SSE:
            self.open_door(seq)
            events.append((0, ("upgrade-accepted", question.nonce, None)))
        committed = len(self.log) + len(events)
        self.state, self.ticket = BOUND, None
        self.concluded |= self.shown
        self.shown = set()
        self.generation += 1
        self.pin_gap(seq, committed)
        effects = self.put(question, *events)
        if self.next() % 5 == 0:
            self.refused_after_all(effects, question.connection, *before)
            return
        delivery = self.served(effects, question.connection)
        assert delivery.medium is Medium.SOCKET
        due = self.now + self.limits.ack_window
        conn = Conn(delivery, seq, gate=committed, gate_floor=seq, ack_due=due, generation=self.generation)
        self.conns[question.connection] = conn

    def refused_after_all(
        self,
        effects: list[Effect],
        id: ConnectionId,
        state: SessionState,
        ticket: str | None,
        shown: set[str],
    ) -> None:
        """The log did not take the handshake: what was pending before it is pending again (U8)."""
        (effect,) = effects
        assert isinstance(effect, Serving)
        self.promises = [promise for promise in self.promises if promise[1] is not effect]
        if state is PENDING:
            self.state, self.ticket, self.shown = state, ticket, shown
            self.concluded -= shown
            self.seen_at = self.now
        else:
            self.unbind(CLOSE_FENCED)
        assert self.put(Dropped(id, effect.pending)) == []

    # Acks -----------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["reads on"] * 3 + ["by post", "on the socket", "on an old socket"]),
        cursor=CURSORS,
        n=st.integers(0, 9),
        most=st.integers(1, 9),
    )
    def a_client_acknowledges(self, what: str, cursor: tuple[str, int], n: int, most: int) -> None:
        if what != "reads on":
            way = {"by post": "post", "on the socket": "socket"}.get(what, "old socket")
            self.state_cursor(self.cursor(*cursor), self.pick_socket(way))
        elif self.writing:
            self.read_on(n, most)

    def read_on(self, n: int, most: int) -> None:
        """A client reads on, and states where it is."""
        self.flush()
        conn = self.writing[n % len(self.writing)]
        for _ in range(3):
            if conn.delivery.connection in self.conns:
                self.write(conn, most)
        if conn.at <= self.committed:
            stated = self.stating(EventId(conn.at, 0, self.link_at(conn.at)))
            self.state_cursor(
                stated, conn if conn.socket and conn.delivery.connection in self.conns else None
            )

    def state_cursor(self, stated: Cursor, conn: Conn | None) -> None:
        """`cursor-ack` on a socket, or `POST …/ack`."""
        input = Acked(stated, None if conn is None else conn.delivery.connection)
        if conn is not None and self.void(conn):
            assert self.put(input) == []
            return
        if self.over is not None:
            self.refuses(self.put(input), self.over)
            return
        self.seen_at = self.now
        unproven = self.unproven(stated.stated)
        if unproven is not None:
            self.refuses(self.put(input), unproven)
            if conn is not None and unproven is not Reason.CURSOR_EVICTED:
                conn.close = CLOSE_EVICTED
            return
        seq = stated.stated.seq
        self.ack(0, seq)
        assert self.put(input) == [Stated(self.acks.get(0, 0))]
        if conn is not None and conn.gate is not None:
            if seq >= conn.gate:
                conn.gate = None
            elif seq > conn.gate_floor:
                conn.gate_floor, conn.ack_due = seq, self.now + self.limits.ack_window

    # Connections ----------------------------------------------------------------------------------

    def drop(self, conn: Conn) -> None:
        if self.state is BOUND and conn.socket and conn.generation == self.generation:
            del self.conns[conn.delivery.connection]
            self.unbind(CLOSE_FENCED)
            self.conns[conn.delivery.connection] = conn
        super().drop(conn)

    def may_end(self, conn: Conn, code: int) -> bool:
        if conn.close is not None:
            return code == conn.close
        overdue = conn.gate is not None and self.now >= conn.ack_due
        read = conn.at == len(self.log) or (conn.gate is not None and conn.at >= conn.gate)
        return {
            CLOSE_ACK_WINDOW: overdue,
            CLOSE_EVICTED: not overdue and conn.at < self.floor,
            CLOSE_NORMAL: conn.stop is not None and conn.at >= conn.stop,
            CLOSE_OVER: self.over is not None and read,
        }.get(code, False)

    def control_due(self, conn: Conn) -> bool:
        if super().control_due(conn):
            return True
        news = conn.restate or conn.resend or self.durable > conn.stated
        return conn.socket and (news or any(after <= self.durable for _, after, _ in conn.untold))

    def told(self, conn: Conn, control: bytes) -> None:
        blocks = decode(control)
        if not conn.opened and conn.close is None and blocks:
            conn.opened, conn.stated = True, self.durable
            blocks = self.opening(conn, blocks)
        for block in blocks:
            assert block.id is None, "C2: only events have IDs"
            body = json.loads(block.data or b"{}")
            match block.event:
                case "received":
                    assert conn.socket
                    statement = self.statement() | ({"resend": True} if conn.resend else {})
                    assert body == statement, "L6: nothing but what is durable"
                    assert conn.restate or conn.resend or self.durable > conn.stated
                    conn.stated, conn.restate, conn.resend = self.durable, False, False
                case "refused":
                    due = next(u for u in conn.untold if u[1] <= self.durable)
                    conn.untold.remove(due)
                    assert (body["n"], body["reason"]) == (due[0], due[2])
                    assert body["error"]["data"]["received"] == self.durable
                case "message":
                    assert block.retry == self.limits.upgrade_window * 1000
                    assert conn.stop is not None, "U10: a `retry:` before `U`, and nowhere else"
                case other:
                    assert other == "keepalive"
                    assert len(blocks) == 1, "C8: a sign of life is for silence"

    def opening(self, conn: Conn, blocks: list[Block]) -> list[Block]:
        """A stream is primed and told `received` (C6); a socket is told the echo, and nothing else (U2)."""
        first, *rest = blocks
        at = EventId(conn.at, 0, self.link_at(conn.at))
        if not conn.socket:
            received, *rest = rest
            assert (first.id, first.data, first.retry) == (str(at), b"", 100)
            assert (received.event, json.loads(received.data or b"")) == ("received", self.statement())
            return rest
        body = json.loads(first.data or b"")
        assert (first.event, first.id, rest) == ("resume-cursor", None, [])
        assert (body["cursor"], body["from"]) == (conn.gate, str(at))
        assert body["generation"] == conn.generation
        assert {key: body[key] for key in ("received", "process") if key in body} == self.statement()
        return rest

    def statement(self) -> dict[str, Any]:
        """What was received, and from which process (L6): as far as that is durable (L2)."""
        process = self.durable_kept["process"]
        return {"received": self.durable} | ({} if process is None else {"process": process})

    # The end --------------------------------------------------------------------------------------

    def terminated(self, reason: Reason, told: str) -> list[tuple[int, object]]:
        self.state = OVER
        return super().terminated(reason, told)

    def summary(self) -> dict[str, Any]:
        pending = self.state is PENDING
        return super().summary() | {
            "state": SSE if self.state is BOUND else self.state,
            "event": self.event if pending else 0,
            "negotiation": self.negotiation if pending else "",
            "ticket": self.ticket if pending else None,
            "shown": set(self.shown) if pending else set(),
            "concluded": set(self.concluded),
            "generation": self.generation,
            "process": self.process,
            "retired": set(self.retired),
        }

    def found(self, session: Session) -> dict[str, Any]:
        door, inbox = session.door, session.inbox
        pending = door.state is PENDING
        return super().found(session) | {
            "state": SSE if door.state is BOUND else door.state,
            "event": door.event if pending else 0,
            "negotiation": door.negotiation if pending else "",
            "ticket": door.ticket if pending else None,
            "shown": set(door.shown) if pending else set(),
            "concluded": set(door.concluded),
            "generation": door.generation,
            "process": inbox.process,
            "retired": set(inbox.retired),
        }

    def process_dies(self, *, landed: bool, expired: bool = False) -> None:
        self.asks = []
        super().process_dies(landed=landed, expired=expired)


@pytest.mark.hypothesis
@pytest.mark.rule("L1", "L2", "L4", "L5", "L6", "L7", "C2", "C4", "C5")
@pytest.mark.rule("U1", "U4", "U7", "U10", "B1", "B6", "B8", "N1", "N2", "N3")
def test_a_long_life_in_the_session_view_is_as_a_naive_model_has_it() -> None:
    long = settings(max_examples=examples(1.0), stateful_step_count=40)
    run_state_machine_as_test(SessionView, settings=long)
