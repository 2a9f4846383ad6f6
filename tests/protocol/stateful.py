"""What the stateful tests of the server's machine share: a log, a commit at a time, connections.

The model is naive on purpose: a list of events, a list of messages, integers. Each view's test says
what an input must append and answer; what is the same in both is checked here after every step, and
after every commit that another process would find it all.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar, Final, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gapless.protocol import record as records
from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.carried import LISTEN, Waiting
from gapless.protocol.cursor import START, EventId, Link, Position
from gapless.protocol.delivery import ConnectionId, Deliver, Delivery, Finish, Medium, Wait
from gapless.protocol.door import TRANSITIONS, Asked
from gapless.protocol.inputs import (
    Accepted,
    Acked,
    Cursor,
    Dispatch,
    Dropped,
    Effect,
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
from gapless.protocol.outbox import Run
from gapless.protocol.refusal import CLOSE_ACK_WINDOW, CLOSE_EVICTED, CLOSE_FENCED, CLOSE_OVER, Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Commit, Session, View
from gapless.protocol.settings import Limits

__all__ = ["CURSORS", "LIMITS", "LINK0", "STARTS", "TEXTS", "Conn", "Logged", "Request", "World", "json_line"]

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


STARTS: Final = 9
"""Ways for a session to begin: 0 with nothing, and others so that what is rare is not far."""


def json_line(message: dict[str, Any]) -> bytes:
    """A JSON-RPC message on one line."""
    return json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False, separators=(",", ":")).encode()


class Logged(NamedTuple):
    """An event that the machine has numbered. It is evicted with all that lie between it and `last`."""

    stream: int
    what: object
    data: bytes
    link: bytes
    size: int
    at: float
    last: int


class Request(NamedTuple):
    """A request of the client that has no answer."""

    number: int
    stream: int
    method: str
    token: Any = None


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
    if body.get("method") == "notifications/cancelled" and "reason" in body["params"]:
        return "withdrawn", body["params"]["requestId"]
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

    @initialize(limits=LIMITS, start=st.integers(0, STARTS - 1))
    def begin(self, limits: Limits, start: int) -> None:
        self.now = 100.0
        self.limits = limits
        self.numbers = start
        self.begin_session(start)

    def begin_session(self, how: int) -> None:
        """A session, as one is opened, and what comes first; some want no second backend (N2)."""
        self.limits = replace(self.limits, on_backend_loss="supersede" if how == 1 else "restart")
        self.open_session()
        self.record = self.durable_record = records.write_record(self.session, "p", None)
        self.kept = self.durable_kept = self.summary()
        self.lagging = self.durable_lagging = self.acks_and_pin()
        self.start(how)

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
        self.commits: list[tuple[int, float]] = []
        """What is durable, a commit at a time: the last event, and when."""
        self.waiting: list[int] = []
        """Messages that no backend was given yet."""
        self.dispatched = self.marked = self.durable_dispatched = 0
        self.acks: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        """The last evicted event of each stream."""
        self.pin: tuple[int, int, float] | None = None
        self.open: dict[Any, Request] = {}
        """Requests without an answer, by ID."""
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
        if not (isinstance(input, Acked) and input.connection is not None):  # that is not answered
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
            self.log.append(
                Logged(int(stream), what, block.data, bytes.fromhex(link), size, self.now, int(seq))
            )
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
            case Stated(ack):
                assert ack <= self.durable_lagging[0].get(0, 0)
            case Dispatch() | Refused() | Ending() | Probing():
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
        assert commit.dispatched == (self.dispatched if self.dispatched != self.marked else None)
        self.marked = self.dispatched
        if commit.floor is not None:
            assert commit.floor == (self.floor, self.link_at(self.floor))
        self.taken = len(self.log)
        self.flight = self.version, commit
        self.kept = self.summary()
        if commit.record:
            self.record = records.write_record(self.session, "p", None)
            self.lagging = self.acks_and_pin()

    def commit_ends(self) -> None:
        """It is durable: what waited for it may be told."""
        assert self.flight is not None
        self.settled, commit = self.flight
        self.session.confirm(commit)
        self.commit_lands()
        self.settle()

    def commit_lands(self) -> None:
        """The log has it; whatever changed is in the record, or was in the last one."""
        assert self.flight is not None
        _, commit = self.flight
        self.flight = None
        if commit.segment.last > self.committed:
            self.commits.append((commit.segment.last, self.now))
        self.committed, self.durable = commit.segment.last, commit.received
        self.durable_dispatched = commit.dispatched or self.durable_dispatched
        if commit.floor is not None:
            self.durable_floor = commit.floor[0]
        self.durable_record, self.durable_kept, self.durable_lagging = self.record, self.kept, self.lagging
        restored = self.restored_session()
        found = self.found(restored)
        assert found == {name: self.durable_kept[name] for name in found}
        pin = restored.outbox.pin
        acks_and_pin = restored.outbox.acks, None if pin is None else (pin.after, pin.upto)
        assert acks_and_pin == self.durable_lagging

    def flush(self) -> None:
        """Everything so far is durable."""
        while self.flight is not None:
            self.commit_ends()

    # Restarts -------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What another process must find in the log (§10), by the names it has here."""
        return {"over": self.over, "open": dict(self.open), "asked": dict(self.asked)}

    def found(self, session: Session) -> dict[str, Any]:
        """As much of the same as can be compared, as a machine has it."""
        open = session.inbox.open.values()
        return {
            "over": session.reason,
            "open": {r.id: Request(r.number, r.stream, r.method, r.token) for r in open},
            "asked": dict(session.inbox.asked),
        }

    def acks_and_pin(self) -> tuple[dict[int, int], tuple[int, int] | None]:
        """What a record may lag behind in, unless somebody was told (C4, L4)."""
        return {s: n for s, n in self.acks.items() if n}, None if self.pin is None else self.pin[:2]

    def runs(self) -> tuple[Run, ...]:
        """What a log retains of the outbox: a run for each commit, less what of it is evicted."""
        found: list[Run] = []
        after = self.durable_floor
        for last, at in self.commits:
            if last > after:
                events = self.log[after:last]
                streams = {e.stream: (seq, Link(e.link)) for seq, e in enumerate(events, after + 1)}
                size = sum(event.size for event in events)
                found.append(Run(last, self.link_at(last), len(events), size, at, streams))
                after = last
        return tuple(found)

    def restored_session(self) -> Session:
        """The session as another process finds it in the log."""
        unhanded = enumerate(
            self.entries[self.durable_dispatched : self.durable], self.durable_dispatched + 1
        )
        retained = records.Retained(
            committed=self.committed,
            link=self.link_at(self.committed),
            floor=self.durable_floor,
            floor_link=self.link_at(self.durable_floor),
            received=self.durable,
            dispatched=self.durable_dispatched,
            runs=self.runs(),
            waiting=tuple(Waiting(number, data, peek(data)) for number, data in unhanded if data),
        )
        record = records.read_record(self.durable_record)
        return records.restore(record, retained, self.limits, "memory", self.now)

    def process_dies(self, *, landed: bool, expired: bool = False) -> None:
        """Another process finds what was committed, and what was under way if that `landed`.

        It goes on with the session, unless that has `expired`.
        """
        if landed and self.flight is not None:
            self.commit_lands()
        self.session = self.restored_session()
        self.log, self.messages = self.log[: self.committed], self.messages[: self.durable]
        self.entries, self.taken = self.entries[: self.durable], self.committed
        for run in self.runs():
            for seq in range(run.last - run.events, run.last):
                self.log[seq] = self.log[seq]._replace(at=run.at, last=run.last)
        for name, value in deepcopy(self.durable_kept).items():
            setattr(self, name, value)
        self.floor = self.durable_floor
        self.dispatched = self.marked = self.durable_dispatched
        unhanded = range(self.dispatched + 1, self.durable + 1)
        self.waiting = [number for number in unhanded if self.entries[number - 1]]
        acks, pin = self.durable_lagging
        self.acks = dict(acks)
        self.pin = None
        if pin is not None:
            self.pin_gap(*pin)
        self.conns, self.attached, self.flight, self.promises = {}, set(), None, []
        self.settled, self.seen_at = self.version, self.now

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
        if self.pin is not None and seq >= self.pin[1]:
            self.pin = None

    # Retention ------------------------------------------------------------------------------------

    def pin_gap(self, after: int, upto: int) -> None:
        """An upgrade pins the events from its cursor on, if there are any (L4)."""
        self.pin = (after, upto, self.now + self.limits.upgrade_window) if after < upto else None

    def evict(self) -> None:
        """L4, as two questions: had each event that went to go, and is there one left that has to?"""
        before = self.floor
        self.session.evict(self.now)
        self.floor = self.session.outbox.floor
        assert before <= self.floor <= self.committed
        if self.pin is not None and self.now >= self.pin[2]:
            self.pin = None
        while before < self.floor:
            assert self.may_go(before), f"event {before + 1} is evicted"
            last = self.log[before].last
            self.gone |= {event.stream: seq for seq, event in enumerate(self.log[before:last], before + 1)}
            before = last
        assert before == self.floor, "what is evicted together is"
        if self.floor < self.committed:
            assert not self.may_go(self.floor), f"event {self.floor + 1} is kept"

    def may_go(self, floor: int) -> bool:
        """Whether the oldest event above this floor is to be evicted, and what goes with it."""
        limits, last = self.limits, self.log[floor].last
        events, size = len(self.log) - floor, sum(event.size for event in self.log[floor:])
        if size > limits.retain_bytes:
            return True
        if self.pin is not None and self.pin[0] < last and floor < self.pin[1]:
            return False
        if events > limits.retain_events or self.now - self.log[floor].at > limits.retain_seconds:
            return True
        used = events > limits.retain_events // 2 or size > limits.retain_bytes // 2
        going = enumerate(self.log[floor:last], floor + 1)
        return used and all(self.acks.get(event.stream, 0) >= seq for seq, event in going)

    def time_passes(self, seconds: float) -> None:
        """So many seconds, at the end of which old events go, and nobody may be there."""
        self.flush()
        self.now += seconds
        self.evict()
        busy = sum(request.method != LISTEN for request in self.open.values()) > len(self.asked)
        idle = not self.conns and not busy and self.over is None
        assert self.session.expired(self.now) == (
            idle and self.now - self.seen_at >= self.limits.session_expiry
        )
        self.settle()

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
            (request.stream, ("error", id, "outcome-unknown")) for id, request in self.open.items()
        ]
        if self.view is View.SESSION:
            events.append((0, ("session-superseded", told)))
        self.open.clear()
        self.waiting.clear()
        self.over, self.ended = reason, self.version
        return events

    @rule(
        what=st.sampled_from(
            ["time"] * 4 + ["break"] * 3 + ["commit", "probe", "probe", "end", "death", "death"]
        ),
        seconds=st.sampled_from([0.1, 1.0, 4.0, 7.0, 11.0, 16.0, 45.0]),
        n=st.integers(0, 9),
        reason=st.sampled_from([Reason.SESSION_ENDED, Reason.SESSION_EXPIRED, Reason.BACKEND_LOST]),
    )
    def something_happens(self, what: str, seconds: float, n: int, reason: Reason) -> None:
        """One rule for all of it: each rule more is one that is switched off in half of the runs."""
        lived = len(self.log) > 12
        began = len(self.log) > 3
        match what:
            case "time":
                self.time_passes(seconds)
            case "break" if self.conns:
                self.drop(list(self.conns.values())[n % len(self.conns)])
            case "commit" if self.flight is not None:
                self.commit_ends()
            case "probe":
                self.probe_ends(n)
            case "death" if began:
                self.process_dies(landed=n % 2 == 1, expired=n == 9)
            case "end" if lived and self.over is None:
                assert self.put(End(reason, ""), *self.terminated(reason, reason.value)) == []
                self.refuses(self.put(End(Reason.SESSION_ENDED, "")), reason)
            case _:
                pass

    def probe_ends(self, n: int) -> None:
        """A probe of a bound socket is over, where there is one."""

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
        self.begin_session(self.next() % STARTS)

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
        assert session.dispatched == self.dispatched
        assert [message.number for message in session.carried.waiting] == self.waiting
        pin = session.outbox.pin
        acks_and_pin = session.outbox.acks, None if pin is None else (pin.after, pin.upto)
        assert acks_and_pin == self.acks_and_pin()
        assert (pin and pin.deadline) == (self.pin and self.pin[2])
        assert (session.inbox.received, session.inbox.durable) == (len(self.messages), self.durable)
        assert list(session.inbox.open) == list(self.open)
        found, summary = self.found(session), self.summary()
        assert found == {name: summary[name] for name in found}
        assert (session.door.state is SessionState.TERMINATED) == (self.over is not None)
        assert set(session.connections) == set(self.conns)
