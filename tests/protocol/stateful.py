"""What the stateful tests of the server's machine share: a log, a commit at a time, connections.

The model is naive on purpose: a list of events, a list of messages, integers. Each view's test says
what an input must append and answer; what is the same in both is checked here after every step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar, Final, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.cursor import START, EventId, Link, Position
from gapless.protocol.delivery import ConnectionId, Deliver, Delivery, Finish, Medium, Wait
from gapless.protocol.door import TRANSITIONS, Asked
from gapless.protocol.inputs import (
    Accepted,
    Cursor,
    Dispatch,
    Dropped,
    Effect,
    Emitted,
    End,
    Ending,
    Input,
    Offered,
    Probing,
    Refused,
    Serving,
    Stated,
)
from gapless.protocol.jsonrpc import peek
from gapless.protocol.refusal import CLOSE_ACK_WINDOW, CLOSE_EVICTED, CLOSE_FENCED, CLOSE_OVER, Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Commit, Session, View
from gapless.protocol.settings import Limits

__all__ = ["CURSORS", "LIMITS", "LINK0", "TEXTS", "Conn", "Logged", "World", "json_line"]

LINK0: Final = Link(bytes(range(8)))

TEXTS: Final = st.sampled_from(
    [
        "step 3 of 10",
        "naïve café — ½ of «it»",
        "日本語のログ 🚀",
        'a "quoted" \\ path: C:\\tmp\\x',
        "first line\nsecond line\r\nthird",
        "separators \u2028 and \u2029 and \u0085",
        "id: 9.0.0123456789abcdef\n\ndata: {}",
        "x" * 300,
        "",
    ]
)
"""What tools say: all of it must pass through JSON and the event-stream format unharmed."""

LIMITS: Final = st.sampled_from(
    [
        Limits(retain_events=4, max_message_bytes=600),
        Limits(retain_events=12, max_message_bytes=600, session_expiry=40.0),
        Limits(retain_events=60, retain_bytes=1500, max_message_bytes=600),
        Limits(retain_events=60, retain_seconds=20.0, upgrade_window=40.0, max_message_bytes=600),
    ]
)
"""Retention that bites. Below 64 events a step of eviction is one event, so that it can be predicted."""

CURSORS: Final = st.tuples(
    st.sampled_from(["here"] * 5 + ["back"] * 3 + ["door"] * 2 + ["start", "foreign", "ahead"]),
    st.integers(0, 40),
)


def json_line(message: dict[str, Any]) -> bytes:
    """A JSON-RPC message on one line."""
    return json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False, separators=(",", ":")).encode()


class Logged(NamedTuple):
    """An event that the machine has numbered."""

    stream: int
    what: object
    data: bytes
    link: bytes
    size: int
    at: float


@dataclass
class Conn:
    """What a connection may still be told, and what it was."""

    delivery: Delivery
    at: int
    stream: int | None = None
    stop: int | None = None
    gate: int | None = None
    gate_floor: int = 0
    ack_due: float = 0.0
    generation: int = 0
    close: int | None = None
    skip: frozenset[int] = frozenset()
    primed: bool = True
    opened: bool = False
    stated: int = 0
    restate: bool = False
    resend: bool = False
    hole: tuple[int, float] | None = None
    untold: list[tuple[int | None, int, Reason]] = field(default_factory=list)

    @property
    def socket(self) -> bool:
        return self.delivery.medium is Medium.SOCKET


def describe(block: Block) -> object:
    """What an event says, as the model predicts it: the machine's own by meaning, others by their bytes."""
    assert block.data is not None
    body = json.loads(block.data)
    match block.event:
        case "upgrade-accepted":
            return "upgrade-accepted", body["negotiation"], body["ticket"]
        case "session-superseded":
            assert body["action"] == "open-new-session"
            assert body["retryable"] is False
            return "session-superseded", body["reason"]
        case _:
            reason = body.get("error", {}).get("data", {}).get("reason")
            return block.data if reason is None else ("error", body["id"], reason)


def decode(data: bytes) -> list[Block]:
    """Whole blocks, and nothing but."""
    decoder = BlockDecoder(1 << 20)
    blocks = decoder.feed(data)
    assert not decoder.pending
    return blocks


class World(RuleBasedStateMachine):
    """One session, from its opening to its end, and then the next."""

    view: ClassVar[View]

    @initialize(limits=LIMITS, start=st.integers(0, 5))
    def begin(self, limits: Limits, start: int) -> None:
        self.now = 100.0
        self.limits = limits
        self.numbers = start
        self.open_session()
        self.start(start)

    def start(self, how: int) -> None:
        """What is there already when the session begins; 0 for nothing."""

    def open_session(self) -> None:
        """A session that nothing has happened in."""
        self.session = Session(self.view, LINK0, self.limits, "memory", self.now)
        self.log: list[Logged] = []
        self.taken = self.committed = self.floor = self.durable_floor = 0
        self.messages: list[tuple[bytes, bytes]] = []
        """What was received: the JSON text, and what of it is recorded."""
        self.durable = 0
        self.entries: list[bytes] = []
        self.handed: list[int] = []
        self.acks: dict[int, int] = {}
        self.pin: tuple[int, int, float] | None = None
        self.open: dict[Any, tuple[int, int, Any]] = {}
        """Requests without an answer: number (or order), stream, progress token."""
        self.asked: dict[Any, int] = {}
        """The backend's questions to the client, by ID: the number of the event."""
        self.over: Reason | None = None
        self.seen_at = self.now
        self.conns: dict[ConnectionId, Conn] = {}
        self.attached: set[ConnectionId] = set()
        """Connections that are served: what their request changed is durable."""
        self.version = self.settled = self.ended = 0
        self.flight: tuple[int, Commit] | None = None
        self.promises: list[tuple[int, Effect]] = []
        self.door = 0
        """The event of the last acceptance."""
        self.restored = False
        self.tried: SessionState | None = None

    def next(self) -> int:
        """A number that was never used: for IDs, nonces, connections."""
        self.numbers += 1
        return self.numbers

    # The machine ----------------------------------------------------------------------------------

    def put(self, input: Input, *expected: tuple[int, object]) -> list[Effect]:
        """One input. It must append what is expected, and is answered once that is durable (L2)."""
        effects = self.session.handle(input, self.now)
        self.version += 1
        self.note_appended(expected)
        self.promises += [(self.version, effect) for effect in effects]
        for effect in effects:
            if isinstance(effect, Refused):
                told = effect.refusal
                stands = (told.committed, told.floor, told.received)
                assert stands == (self.committed, self.floor, self.durable), "C2: where the server is"
        self.settle()
        return effects

    def note_appended(self, expected: tuple[tuple[int, object], ...]) -> None:
        """Numbers without a hole (L1), links over everything before (L5), and the content as predicted."""
        pending = decode(self.session.copy().take().segment.data)
        fresh = pending[len(self.log) - self.taken :]
        found: list[tuple[int, object]] = []
        for block in fresh:
            assert block.id is not None
            assert block.data is not None
            seq, stream, link = block.id.split(".")
            assert int(seq) == len(self.log) + 1
            before = self.log[-1].link if self.log else LINK0
            text = before + b"%s\n%s\n" % (stream.encode(), block.event.encode()) + block.data
            assert link == sha256(text).hexdigest()[:16]
            what = describe(block)
            name = b"" if block.event == "message" else b"event: %s\n" % block.event.encode()
            size = len(b"id: %s\n%sdata: %s\n\n" % (block.id.encode(), name, block.data))
            self.log.append(Logged(int(stream), what, block.data, bytes.fromhex(link), size, self.now))
            found.append((int(stream), what))
        assert found == list(expected)

    def answer(self, effects: list[Effect]) -> Effect:
        """The one effect that answers a request."""
        (effect,) = (e for e in effects if not isinstance(e, Dispatch))
        return effect

    def refuses(self, effects: list[Effect], reason: Reason) -> None:
        """It is refused for this reason, and nothing else happens."""
        (effect,) = effects
        assert isinstance(effect, Refused), effect
        assert effect.refusal.reason is reason

    # Commits --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What has nothing to wait for is told at once."""
        if self.flight is None and self.session.dirty:
            self.commit_begins()
        elif self.flight is None:
            self.settled = self.version
        due = [effect for version, effect in self.promises if version <= self.settled]
        self.promises = [p for p in self.promises if p[0] > self.settled]
        for effect in due:
            self.tell(effect)

    def tell(self, effect: Effect) -> None:
        """An effect is carried out: everything it speaks of is durable by now (L2)."""
        match effect:
            case Serving(delivery, echo):
                assert echo <= self.committed
                assert delivery.opening.seq <= self.committed
                self.attached.add(delivery.connection)
            case Accepted(received):
                assert received <= self.durable
            case Offered(event):
                assert event <= self.committed
            case Dispatch(number, data, envelope):
                assert number <= self.durable
                assert self.messages[number - 1][1] == data
                assert envelope == peek(data)
                assert not self.handed or self.handed[-1] < number, "S6: once, and in order"
                self.handed.append(number)
            case Refused() | Stated() | Ending() | Probing():
                pass

    def commit_begins(self) -> None:
        """What has gathered while the last commit ran goes to the log in one."""
        self.evict()
        commit = self.session.take()
        assert commit.expect == self.taken
        assert commit.segment.last == len(self.log)
        assert commit.received == len(self.messages)
        recorded = [data for _, data in self.messages[len(self.entries) :]]
        assert [entry.data for entry in commit.entries] == recorded
        assert [e.number for e in commit.entries] == [len(self.entries) + n + 1 for n in range(len(recorded))]
        self.entries += recorded
        if commit.floor is not None:
            assert commit.floor == (self.floor, self.link_at(self.floor))
        self.taken = len(self.log)
        self.flight = self.version, commit
        self.records(commit)

    def commit_ends(self) -> None:
        """It is durable: what waited for it may be told."""
        assert self.flight is not None
        self.settled, commit = self.flight
        self.flight = None
        self.session.confirm(commit)
        self.committed, self.durable = commit.segment.last, commit.received
        if commit.floor is not None:
            self.durable_floor = commit.floor[0]
        self.recorded()
        self.settle()

    def records(self, commit: Commit) -> None:
        """A commit begins: a place to look at what it keeps."""

    def recorded(self) -> None:
        """And it is durable."""

    def flush(self) -> None:
        """Everything so far is durable."""
        while self.flight is not None:
            self.commit_ends()

    # Cursors --------------------------------------------------------------------------------------

    def link_at(self, seq: int) -> Link:
        """The link of an event, or of the start."""
        return Link(self.log[seq - 1].link) if seq else LINK0

    def cursor(self, kind: str, n: int, stream: int = 0) -> Cursor:
        """A cursor as somebody states it, beside what the log holds at that number (C3).

        `here`: where a connection is, or the end of what is durable; `back`: so many events before that;
        `door`: the last acceptance.
        """
        stated: Position
        here = [c.at for c in self.conns.values() if c.at <= self.committed]
        at = ([*here, self.committed])[n % (len(here) + 1)]
        match kind:
            case "start":
                stated = START
            case "ahead":
                stated = EventId(self.committed + 1 + n, stream, Link(bytes(8)))
            case "foreign":
                stated = EventId(at, stream, Link(bytes(b ^ 1 for b in self.link_at(at))))
            case "back":
                seq = max(0, self.committed - n)
                stated = EventId(seq, stream, self.link_at(seq))
            case _:
                at = min(self.door or at, self.committed) if kind == "door" else at
                stated = EventId(at, stream, self.link_at(at))
        return self.stating(stated)

    def stating(self, stated: Position) -> Cursor:
        """This position, and the log's link at it."""
        retained = self.durable_floor <= stated.seq <= self.committed
        return Cursor(stated, self.link_at(stated.seq) if retained else None)

    def unproven(self, stated: Position) -> Reason | None:
        """C5, in its order."""
        if stated.seq < self.floor:
            return Reason.CURSOR_EVICTED
        if stated.seq > self.committed:
            return Reason.CURSOR_AHEAD
        if isinstance(stated, EventId) and stated.link != self.link_at(stated.seq):
            return Reason.CURSOR_FOREIGN
        return None

    def ack(self, stream: int, seq: int) -> None:
        """The ack cursor is the highest proven one that was stated (C4)."""
        self.acks[stream] = max(seq, self.acks.get(stream, 0))
        if self.pin is not None and self.acks.get(0, 0) >= self.pin[1]:
            self.pin = None

    # Retention ------------------------------------------------------------------------------------

    def evict(self) -> None:
        """L4, as two questions: had each event that went to go, and is there one left that has to?"""
        before = self.floor
        self.session.evict(self.now)
        self.floor = self.session.outbox.floor
        assert before <= self.floor <= self.committed
        if self.pin is not None and self.now >= self.pin[2]:
            self.pin = None
        if self.restored:
            return  # what a log retains is one run for eviction
        for seq in range(before + 1, self.floor + 1):
            assert self.may_go(seq), f"event {seq} is evicted"
        if self.floor < self.committed:
            assert not self.may_go(self.floor + 1), f"event {self.floor + 1} is kept"

    def may_go(self, seq: int) -> bool:
        """Whether the oldest event, which is `seq`, is to be evicted."""
        event, limits = self.log[seq - 1], self.limits
        events, size = len(self.log) - (seq - 1), sum(e.size for e in self.log[seq - 1 :])
        if size > limits.retain_bytes:
            return True
        if self.pin is not None and self.pin[0] < seq <= self.pin[1]:
            return False
        if events > limits.retain_events or self.now - event.at > limits.retain_seconds:
            return True
        used = events > limits.retain_events // 2 or size > limits.retain_bytes // 2
        return used and self.acks.get(event.stream, 0) >= seq

    def time_passes(self, seconds: float) -> None:
        """So many seconds, at the end of which old events go, and nobody may be there."""
        self.flush()
        self.now += seconds
        self.evict()
        busy = len(self.open) > len(self.asked)
        idle = not self.conns and not busy and self.over is None
        assert self.session.expired(self.now) == (
            idle and self.now - self.seen_at >= self.limits.session_expiry
        )
        self.settle()

    # The backend ----------------------------------------------------------------------------------

    def emit(self, message: dict[str, Any], *expected: tuple[int, object], related: Any = None) -> None:
        """The backend says something; of a session that is over nothing is kept."""
        data = json_line(message)
        self.put(Emitted(data, peek(data), related), *(() if self.over is not None else expected))

    def answer_request(self, text: str, n: int, *, fails: bool) -> None:
        """The backend answers an open request, and then again: it was settled, so that is dropped (L7)."""
        if not self.open:
            return
        id = list(self.open)[n % len(self.open)]
        _, stream, _ = self.open.pop(id)
        said = {"error": {"code": 1, "message": text}} if fails else {"result": {"text": text}}
        self.emit({"id": id, **said}, (stream, json_line({"id": id, **said})))
        self.emit({"id": id, **said})

    # Connections ----------------------------------------------------------------------------------

    def connection(self) -> ConnectionId:
        return ConnectionId(self.next())

    def served(self, effects: list[Effect], conn_id: ConnectionId) -> Delivery:
        """It is answered by serving this connection."""
        effect = self.answer(effects)
        assert isinstance(effect, Serving), effect
        assert effect.delivery.connection == conn_id
        assert effect.committed == len(self.log)
        return effect.delivery

    @property
    def writing(self) -> list[Conn]:
        """The connections whose feeds run."""
        return [conn for id, conn in self.conns.items() if id in self.attached]

    def drop(self, conn: Conn) -> None:
        """The connection is gone."""
        del self.conns[conn.delivery.connection]
        self.seen_at = self.now
        self.put(Dropped(conn.delivery.connection))

    def write(self, conn: Conn, most: int) -> None:
        """What a feed does: ask, write at most so many events, advance; or end, or wait."""
        step = self.session.poll(conn.delivery, self.now)
        match step:
            case Deliver(control, after, upto):
                assert control or upto > after
                self.told(conn, control)
                if after < upto:
                    assert self.floor <= after
                    assert upto <= self.writable(conn)
                    last = min(upto, after + most)
                    for seq in range(after + 1, last + 1):
                        if self.carries(conn, seq):
                            assert seq == self.following(conn), "in order, and none left out"
                            conn.at = seq
                    self.session.advance(conn.delivery, last, self.now)
                else:
                    self.session.advance(conn.delivery, after, self.now)
            case Finish(control, code):
                self.told(conn, control)
                assert self.may_end(conn, code), f"{code} at {conn.at}"
                self.drop(conn)
            case Wait(until):
                assert until > self.now
                following = self.following(conn)
                assert following is None or following > self.writable(conn), "S2: it is not up to date"
                assert not self.control_due(conn)
                for code in (CLOSE_ACK_WINDOW, CLOSE_EVICTED, CLOSE_FENCED, CLOSE_OVER, 1000):
                    assert not self.may_end(conn, code)

    def writable(self, conn: Conn) -> int:
        """The highest event that may go out: durable (L2), within the gap (U4), up to `U` (U10)."""
        bounds = [self.committed, conn.gate, conn.stop]
        return min(b for b in bounds if b is not None)

    def carries(self, conn: Conn, seq: int) -> bool:
        """Whether this connection is to get this event."""
        ours = conn.stream is None or self.log[seq - 1].stream == conn.stream
        return ours and seq not in conn.skip

    def following(self, conn: Conn) -> int | None:
        """The event that this connection gets next, durable or not."""
        rest = range(conn.at + 1, len(self.log) + 1)
        return next((seq for seq in rest if self.carries(conn, seq)), None)

    def may_end(self, conn: Conn, code: int) -> bool:
        """Whether a connection may be ended with this code."""
        raise NotImplementedError

    def control_due(self, conn: Conn) -> bool:
        """Whether something other than an event is still to be told."""
        return not conn.opened and conn.primed

    def told(self, conn: Conn, control: bytes) -> None:
        """Control blocks are written: they are due, and they are true."""
        raise NotImplementedError

    # The end --------------------------------------------------------------------------------------

    def terminated(self, reason: Reason, told: str) -> list[tuple[int, object]]:
        """The session ends: every open request is settled, then it says why (B1, B9, L7)."""
        events: list[tuple[int, object]] = [
            (stream, ("error", id, "outcome-unknown")) for id, (_, stream, _) in self.open.items()
        ]
        if self.view is View.SESSION:
            events.append((0, ("session-superseded", told)))
        self.open.clear()
        self.over, self.ended = reason, self.version
        return events

    @rule(
        what=st.sampled_from(["time"] * 4 + ["break"] * 3 + ["commit", "probe", "probe", "end", "death"]),
        seconds=st.sampled_from([0.1, 1.0, 4.0, 7.0, 11.0, 16.0, 45.0]),
        n=st.integers(0, 9),
        reason=st.sampled_from([Reason.SESSION_ENDED, Reason.SESSION_EXPIRED, Reason.BACKEND_LOST]),
    )
    def something_happens(self, what: str, seconds: float, n: int, reason: Reason) -> None:
        """One rule for all of it: each rule more is one that is switched off in half of the runs."""
        lived = len(self.log) > 12
        match what:
            case "time":
                self.time_passes(seconds)
            case "break" if self.conns:
                self.drop(list(self.conns.values())[n % len(self.conns)])
            case "commit" if self.flight is not None:
                self.commit_ends()
            case "probe":
                self.probe_ends(n)
            case "death" if lived:
                self.process_dies()
            case "end" if lived and self.over is None:
                assert self.put(End(reason, ""), *self.terminated(reason, reason.value)) == []
                self.refuses(self.put(End(Reason.SESSION_ENDED, "")), reason)
            case _:
                pass

    def probe_ends(self, n: int) -> None:
        """A probe of a bound socket is over, where there is one."""

    def process_dies(self) -> None:
        """Another process must find the session in the log."""

    @invariant()
    def the_world_moves_on(self) -> None:
        """Commits end, connections write, and a session that is over is followed by the next.

        These are no rules, for a rule may be switched off for a whole run. Each connection takes its own
        time: of the events that it may write it writes none, or a few.
        """
        if self.flight is not None and self.version >= self.flight[0] + 3:
            self.commit_ends()
        for conn in self.writing:
            most = (self.version + 3 * conn.delivery.connection) % 7
            if most:
                self.write(conn, most)
        if self.over is None or self.version < self.ended + 8:
            return
        self.flush()
        for conn in list(self.conns.values()):
            for _ in range(5):
                if conn.delivery.connection in self.conns:
                    self.write(conn, 1 << 20)
            assert conn.delivery.connection not in self.conns, "S5: it gets to its end"
        self.open_session()
        self.start(self.next() % 6)

    # Always ---------------------------------------------------------------------------------------

    @invariant()
    def what_the_table_does_not_have_raises_and_changes_nothing(self) -> None:
        door = self.session.door
        if door.state is self.tried:
            return
        self.tried = door.state
        before = {name: getattr(door, name) for name in type(door).__slots__}
        for asked in Asked:
            if (door.state, asked) not in TRANSITIONS:
                with pytest.raises(KeyError):
                    door.take(asked)
        assert {name: getattr(door, name) for name in type(door).__slots__} == before

    @invariant()
    def the_machine_and_the_model_agree(self) -> None:
        session = self.session
        assert (session.outbox.head, session.outbox.committed) == (len(self.log), self.committed)
        assert session.outbox.floor == self.floor
        assert session.outbox.floor_link == self.link_at(self.floor)
        assert {s: n for s, n in session.outbox.acks.items() if n} == {
            s: n for s, n in self.acks.items() if n
        }
        assert (session.inbox.received, session.inbox.durable) == (len(self.messages), self.durable)
        assert list(session.inbox.open) == list(self.open)
        assert session.inbox.asked == self.asked
        assert session.reason is self.over
        assert (session.door.state is SessionState.TERMINATED) == (self.over is not None)
        assert set(session.connections) == set(self.conns)
