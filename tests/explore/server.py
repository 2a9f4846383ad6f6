"""The server of an explored world: the real machine, the real log, and what the runtime does around them.

What `gapless.server` does with tasks and futures is done here by explicit steps: a commit under way,
answers that wait for it, a probe that waits for life, a feed per connection. Beside that the server
keeps an account of its own of what it was told and what it did, and checks the machine against it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from gapless.errors import ConflictError, MalformedError
from gapless.log.base import BelowFloorError, SessionKey, Write
from gapless.log.memory import MemoryLog
from gapless.protocol import cursor as cursors
from gapless.protocol.block import Block, encode_event
from gapless.protocol.cursor import EventId, Link, Start, parse_event_id
from gapless.protocol.delivery import ConnectionId, Deliver, Delivery, Finish, Medium, Wait
from gapless.protocol.inputs import (
    Accepted,
    Acked,
    Cursor,
    Dispatch,
    Dropped,
    Effect,
    Emitted,
    End,
    Ending,
    Handed,
    Handshake,
    Input,
    Known,
    Listen,
    Lost,
    Message,
    Offered,
    Probing,
    Refused,
    Revive,
    Serving,
    Stated,
    Upgrade,
    Verdict,
)
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.record import write_record
from gapless.protocol.refusal import CLOSE_EVICTED, CLOSE_FENCED, Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Commit, Session, View
from gapless.protocol.settings import Limits
from gapless.server.feed import CHUNK, _filtered  # pyright: ignore[reportPrivateUsage]
from gapless.server.intake import message_input, message_number
from gapless.server.live import as_write
from gapless.server.sessions import own
from tests.explore.parts import Violation, blocks, decode, freeze

__all__ = [
    "AGED",
    "LAPSED",
    "LINK0",
    "NOTIFICATION",
    "Ask",
    "Server",
    "Servers",
    "result_of",
]

KEY: Final = SessionKey(b"session")
LINK0: Final = Link(bytes(range(8)))
NOTIFICATION: Final = b'{"jsonrpc":"2.0","method":"notifications/n"}'
AGED: Final = 6.0
"""Seconds after which everything is too old, where a scenario says so; pins hold longer."""
LAPSED: Final = 40.0
"""Seconds after which pins have lapsed, too."""
_NOWHERE: Final = 1 << 40
_PROBES: Final = 3  # as in server.sessions

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the memory log, which never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the memory log suspended")


def result_of(id: int) -> bytes:
    """The backend's answer to a request."""
    return b'{"jsonrpc":"2.0","id":%d,"result":{}}' % id


class Ask(NamedTuple):
    """A question that waits for a probe (B6)."""

    rid: int
    input: Listen | Upgrade | Handshake
    tries: int
    conn: int
    generation: int
    heard: bool


class Told(NamedTuple):
    """An event of the log, as it was committed."""

    stream: int
    event: str
    data: bytes
    link: Link
    size: int


class Servers:
    """All states of one exploration's server, each once."""

    def __init__(self, view: View, limits: Limits, *, crashes: bool) -> None:
        self.view = view
        self.limits = limits
        self.crashes = crashes
        self.table: dict[Any, Server] = {}

    def start(self) -> Server:
        """A session that was just opened."""
        server = Server(self)
        server.session = Session(self.view, LINK0, self.limits, "memory", 0.0)
        server.log = MemoryLog(clock=lambda: 0.0)
        run(server.log.create(KEY, write_record(server.session, "p", None), LINK0))
        return self.intern(server)

    def intern(self, server: Server) -> Server:
        """The one server in this state."""
        key = server.freeze()
        found = self.table.get(key)
        if found is None:
            server.number = len(self.table)
            found = self.table[key] = server
        return found


class Server:
    """One state of the server. Read it freely; change it only by `step`, which returns another."""

    session: Session
    log: MemoryLog

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.number = -1
        self.up = True
        """Whether the process runs."""
        self.fence = 0
        """What this process writes under (N1)."""
        self.commit: tuple[Commit, Write, int] | None = None
        """The commit under way, and what of the account comes true with it."""
        self.waiting: tuple[tuple[Any, ...], ...] = ()
        """What is told when it is durable; `later` waits for the commit after it."""
        self.later: tuple[tuple[Any, ...], ...] = ()
        self.asks: tuple[Ask, ...] = ()
        self.attached: frozenset[int] = frozenset()
        """Connections whose feed runs."""
        self.reads: tuple[tuple[int, Deliver], ...] = ()
        """Feeds that wait for the log: polled, not yet written (slow stores only)."""
        # The account.
        self.history: tuple[Told, ...] = ()
        self.handed: tuple[int, ...] = ()
        """Requests that a backend was ever given; `has` those that this one was."""
        self.has: tuple[int, ...] = ()
        self.stated: dict[int, int] = {}
        self.gates: dict[int, tuple[int, bool]] = {}
        self.pin: tuple[int, int] | None = None
        self.old = 0
        """Events up to here are older than `AGED`."""
        self.doors = 0
        """The last `upgrade-accepted` that a handshake concluded; `passed`, durably."""
        self.passed = 0
        self.memo: dict[tuple[Any, ...], tuple[Server, tuple[tuple[Any, ...], ...]]] = {}
        self._due: frozenset[int] | None = None
        self._accepted: frozenset[Any] | None = None
        self._out: list[tuple[Any, ...]] = []
        self.told: list[str] = []

    def step(self, *act: Any) -> tuple[Server, tuple[tuple[Any, ...], ...]]:
        """Take one step; return the server after it and what it sends out."""
        found = self.memo.get(act)
        if found is None:
            draft = self._fork()
            getattr(draft, "_on_" + act[0])(*act[1:])
            draft._settle(self)
            found = self.memo[act] = (self.servers.intern(draft), tuple(draft._out))
        return found

    def explain(self, *act: Any) -> list[str]:
        """What the machine says in this step, for a trace."""
        draft = self._fork()
        try:
            getattr(draft, "_on_" + act[0])(*act[1:])
        except Exception as error:  # it is what the trace is about
            draft.told.append(f"{type(error).__name__}: {error}")
        return draft.told

    def _fork(self) -> Server:
        draft = Server(self.servers)
        draft.session, draft.log = self.session.copy(), self.log.copy()
        draft.commit, draft.waiting, draft.later = self.commit, self.waiting, self.later
        draft.asks, draft.attached, draft.reads = self.asks, self.attached, self.reads
        draft.up, draft.fence, draft.has = self.up, self.fence, self.has
        draft.history, draft.handed = self.history, self.handed
        draft.doors, draft.passed = self.doors, self.passed
        draft.stated, draft.gates = dict(self.stated), dict(self.gates)
        draft.pin, draft.old = self.pin, self.old
        return draft

    def freeze(self) -> Any:
        """The canonical form. What the link at the head implies (the events before it) is left out."""
        session = self.session
        session.idle_since = 0.0
        session.connections = dict(sorted(session.connections.items()))
        stored = self.log._sessions[KEY].stored  # pyright: ignore[reportPrivateUsage]
        commit = self.commit and (self.commit[1].last, len(self.commit[1].entries), self.commit[1].floor)
        return (
            freeze(session),
            (stored.committed, stored.floor, stored.received, stored.dispatched),
            (stored.record, self.up, self.fence, self.has, self.passed) if self.servers.crashes else None,
            commit,
            self.waiting,
            self.later,
            self.asks,
            self.attached,
            self.reads,
            self.handed,
            freeze(self.stated),
            freeze(self.gates),
            self.pin,
            self.old,
            self.doors,
        )

    # What can happen --------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """What is durable, by the log's own word."""
        return self.log._sessions[KEY].stored.committed  # pyright: ignore[reportPrivateUsage]

    @property
    def due(self) -> frozenset[int]:
        """Connections that have something to write, or to end."""
        if self._due is None:
            busy = {conn for conn, _ in self.reads}
            for conn in self.attached:
                delivery = self.session.connections[ConnectionId(conn)].copy()
                step = self.session.poll(delivery, 0.0)
                # A `retry:` alone says nothing that the next write would not say in time.
                alone = (
                    isinstance(step, Deliver)
                    and step.after == step.upto
                    and step.control.startswith(b"retry:")
                )
                if not isinstance(step, Wait) and not alone:
                    busy.add(conn)
            self._due = frozenset(busy)
        return self._due

    @property
    def accepted(self) -> frozenset[Any]:
        """The requests that the inbox holds durably."""
        if self._accepted is None:
            entries = run(self.log.entries(KEY, 0, _NOWHERE))
            looked = [_peek(entry.data) for entry in entries if entry.data]
            self._accepted = frozenset(e.id for e in looked if e.kind is Kind.REQUEST)
        return self._accepted

    @property
    def answerable(self) -> list[int]:
        """Requests that the backend has and has not answered."""
        open = self.session.inbox.open
        return [id for id in self.has if id in open]

    def ready(self, messages: tuple[tuple[int, bytes], ...]) -> bool:
        """Whether these messages can be taken: a repeated number is compared with what is durable (L6)."""
        if not self.up:
            return False
        if self.commit is None and not self.session.dirty:
            return True
        return all(number > self.session.inbox.received for number, _ in messages[:1])

    @property
    def numbers(self) -> list[int]:
        """The numbers of connections that are there, or asked for."""
        asked = [ask.input for ask in self.asks] + [
            w[4] for w in self.waiting + self.later if w[1] == "probing"
        ]
        return [*self.session.connections, *(getattr(input, "connection", 0) for input in asked)]

    def __str__(self) -> str:
        session, outbox = self.session, self.session.outbox
        deliveries = [
            f"{d.medium.value} {d.connection} at {d.position}"
            + "".join(f" {k}={getattr(d, k)}" for k in ("stop", "gate", "close") if getattr(d, k) is not None)
            for d in session.connections.values()
        ]
        return (
            f"server {session.door.state.value if self.up else 'down'}, "
            f"floor {outbox.floor}, log {self.committed}, head {outbox.head}, ack {outbox.acks}, "
            f"received {session.inbox.received}, open {list(session.inbox.open)}, "
            f"{'commit under way, ' if self.commit else ''}{deliveries}"
        )

    def delivery(self, conn: int) -> Delivery | None:
        """A connection's delivery."""
        return self.session.connections.get(ConnectionId(conn))

    def link_at(self, seq: int) -> Link:
        """The link of a committed event."""
        return LINK0 if seq == 0 else self.history[seq - 1].link

    def id_at(self, seq: int) -> EventId:
        """The event ID of a committed event."""
        return EventId(seq, self.history[seq - 1].stream if seq else 0, self.link_at(seq))

    # Requests ---------------------------------------------------------------------------------------

    def _on_request(self, rid: int, conn: int, kind: str, *args: Any) -> None:
        over = self.session.ended()
        if over is not None:
            self._answer(rid, ("refused", over.refusal))
            return
        getattr(self, "_request_" + kind)(rid, ConnectionId(conn), *args)

    def _cursor(self, rid: int, text: str) -> Cursor | None:
        try:
            # By the module's attribute, which a mutant may replace.
            position = cursors.parse_cursor(text)
        except MalformedError as error:
            self._answer(rid, ("refused", self.session.refusal(Reason.MALFORMED, str(error)).refusal))
            return None
        return Cursor(position, run(self.log.link(KEY, position.seq)))

    def _request_get(self, rid: int, conn: ConnectionId, text: str | None) -> None:
        cursor, held = None, None
        if text is not None:
            cursor = self._cursor(rid, text)
            if cursor is None:
                return
        elif self.session.view is View.STREAM:
            held = run(self.log.link(KEY, self.session.standalone_position))
        self._ask(rid, Listen(conn, cursor, held), 0)

    def _request_upgrade(self, rid: int, _: ConnectionId, text: str, nonce: str) -> None:
        cursor = self._cursor(rid, text)
        if cursor is not None:
            self._ask(rid, Upgrade(cursor, nonce, f"ticket-{nonce}", "/events"), 0)

    def _request_knock(self, rid: int, conn: ConnectionId, text: str, ticket: str | None) -> None:
        cursor = self._cursor(rid, text)
        if cursor is not None:
            self._ask(rid, Handshake(conn, cursor, ticket, "own", "/events"), 0)

    def _request_delete(self, rid: int, _: ConnectionId) -> None:
        self._put(End(Reason.SESSION_ENDED, ""))
        self._begin()
        self._answer(rid, ("ended",))  # nobody waits for it

    def _request_ack(self, rid: int, _: ConnectionId, text: str) -> None:
        cursor = self._cursor(rid, text)
        if cursor is not None:
            self._wait(rid, self._put(Acked(cursor)))

    def _request_post(
        self, rid: int, _: ConnectionId, process: str, messages: tuple[tuple[int, bytes], ...]
    ) -> None:
        (number, data), rest = messages[0], messages[1:]
        found = message_input(data, 1 << 20, number=number, process=process, known=self._known(number))
        self._wait(rid, self._put(found), rest)

    def _request_mcp(self, rid: int, conn: ConnectionId, data: bytes) -> None:
        """A POST of the stream view."""
        looked = message_input(data, 1 << 20)
        self._wait(
            rid, self._put(Message(looked.data, looked.digest, looked.envelope, answer_on=conn, primed=True))
        )

    def _known(self, number: int) -> Known | None:
        if number > self.session.inbox.received:
            return None
        found = run(self.log.entries(KEY, number - 1, 1))
        return Known(found[0].digest, not found[0].data) if found else None

    # Sockets, backend, log --------------------------------------------------------------------------

    def _on_frame(self, conn: int, process: str, frame: bytes) -> None:
        # Whatever comes in is life (B6).
        self.asks = tuple(a._replace(heard=True) if a.conn == conn else a for a in self.asks)
        delivery = self.session.connections[ConnectionId(conn)]
        void = delivery.close is not None
        before = (self.session.inbox.received, dict(self.session.outbox.acks))
        for block in blocks(frame):
            self._block(ConnectionId(conn), process, block)
        if void and before != (self.session.inbox.received, self.session.outbox.acks):
            raise Violation("B8: what came from a fenced socket was taken")

    def _block(self, conn: ConnectionId, process: str, block: Block) -> None:
        if block.event == "message":
            number = message_number(block.id)
            assert number is not None
            found = message_input(
                block.data or b"",
                1 << 20,
                number=number,
                process=process,
                known=self._known(number),
                connection=conn,
            )
            # The writer states `received` once it is durable; nobody waits for that here.
            self._wait(0, [e for e in self._put(found) if isinstance(e, Dispatch)])
        elif block.event == "cursor-ack":
            position = cursors.parse_cursor(msgspec.json.decode(block.data or b"")["cursor"])
            cursor = Cursor(position, run(self.log.link(KEY, position.seq)))
            self._put(Acked(cursor, conn))
            self._begin()

    def _on_gone(self, conn: int) -> None:
        """The connection is gone, and the runtime has noticed."""
        self.attached -= {conn}
        self.reads = tuple(r for r in self.reads if r[0] != conn)
        self.gates.pop(conn, None)
        self._put(Dropped(ConnectionId(conn)))
        # Whoever probes it learns that it is gone by asking again.
        self.asks = tuple(a._replace(heard=True) if a.conn == conn else a for a in self.asks)
        self._begin()

    def _on_died(self, conn: int) -> None:
        """Nobody is at the other end, which the runtime has not noticed: it writes, to nobody."""
        delivery = self.session.connections[ConnectionId(conn)]
        delivery.opened, delivery.position, delivery.stated = True, _NOWHERE, _NOWHERE
        delivery.gate = delivery.stop = delivery.retry = None
        delivery.refused.clear()
        self.reads = tuple(r for r in self.reads if r[0] != conn)
        self.gates.pop(conn, None)

    def _on_emit(self, data: bytes) -> None:
        self._put(Emitted(data, _peek(data)))
        self._begin()

    def _on_commit(self) -> None:
        self.session.confirm(self._land())
        waiting, self.waiting = self.waiting, ()
        if self.session.dirty:
            self._begin()
            self.waiting, self.later = self.later, ()
        else:
            waiting, self.later = waiting + self.later, ()
        for waiter in waiting:
            self._release(waiter)

    def _land(self) -> Commit:
        """The log has made the commit under way durable."""
        assert self.commit is not None
        (commit, write, self.passed), self.commit = self.commit, None
        run(self.log.commit(KEY, write))
        for block in blocks(write.segment):
            assert block.id is not None
            id = parse_event_id(block.id)
            data = block.data or b""
            size = len(encode_event(id, block.event, data))
            self.history += (Told(id.stream, block.event, data, id.link, size),)
        return commit

    def _on_aged(self, seconds: float) -> None:
        """So much time passes. The clock stands at 0 here; what happened before is that much older now."""
        outbox = self.session.outbox
        for mark in outbox._marks:  # pyright: ignore[reportPrivateUsage]
            mark.at -= seconds
        if outbox.pin is not None:
            outbox.pin = replace(outbox.pin, deadline=outbox.pin.deadline - seconds)
        self.old = outbox.head
        if seconds >= self.session.limits.upgrade_window:
            self.pin = None
        self._evict()
        self._begin()

    def _on_end(self) -> None:
        self._put(End(Reason.SESSION_EXPIRED, ""))
        self._begin()

    # The process ------------------------------------------------------------------------------------

    def _on_crash(self, landed: bool) -> None:
        """The process dies. A commit under way has made it to the log, or it has not.

        The session is as the next process finds it. That finds it only later, but nothing can come between.
        """
        late = self.commit
        if landed:
            self._land()
        self.up, self.has, self.doors = False, (), self.passed
        self.commit, self.waiting, self.later, self.asks = None, (), (), ()
        self.attached, self.reads, self.gates = frozenset(), (), {}
        stored = run(self.log.load(KEY))
        assert stored is not None
        self.session, _, self.fence = run(own(self.log, stored, self.servers.limits, None, now=0.0, unix=0.0))
        if late is not None and not landed and self.session.reason is None:
            self._check_fence(late[1])

    def _check_fence(self, write: Write) -> None:
        """A write of the process before, which may be slow to get to the log, is refused by it (N1, L8)."""
        try:
            run(self.log.copy().commit(KEY, write))
        except ConflictError:
            return
        raise Violation("N1: a process that another one has taken over from still writes to the log")

    def _on_boot(self) -> None:
        """The next process takes the session over; its backend is gone (N2)."""
        self.up = True
        if self.session.reason is not None:
            return
        self._put(Lost("restarted", taken_over=True))
        self._revive()

    def _on_lost(self) -> None:
        """The backend dies, and its owner goes on with another (N2)."""
        self.has = ()
        self._put(Lost("it crashed"))
        self._revive()

    def _revive(self) -> None:
        """A fresh backend begins. No handshake is explored, so it has nothing to be told."""
        self._wait(0, self._put(Revive(())))

    # Probes -----------------------------------------------------------------------------------------

    def _on_verdict(self, rid: int, alive: bool) -> None:
        ask = next(a for a in self.asks if a.rid == rid)
        self.asks = tuple(a for a in self.asks if a.rid != rid)
        self._again(ask, alive)

    def _again(self, ask: Ask, alive: bool) -> None:
        if ask.tries == _PROBES:
            refused = self.session.refusal(Reason.WEBSOCKET_BOUND, "other sockets keep taking this session")
            self._answer(ask.rid, ("refused", refused.refusal))
            return
        again = msgspec.structs.replace(ask.input, verdict=Verdict(ask.generation, alive))
        self._ask(ask.rid, again, ask.tries)

    def _ask(self, rid: int, input: Listen | Upgrade | Handshake, tries: int) -> None:
        self._wait(rid, self._put(input), (), input, tries)

    # The machine ------------------------------------------------------------------------------------

    def _put(self, input: Input) -> list[Effect]:
        session = self.session
        floor, head, committed = session.outbox.floor, session.outbox.head, self.committed
        state = session.door.state
        effects = session.handle(input, 0.0)
        self.told.append(f"{input} → {effects}")
        cursor: Any = getattr(input, "cursor", None)
        for effect in effects:
            match effect:
                case Serving(delivery, echo) if delivery.medium is Medium.SOCKET:
                    assert cursor is not None, "a handshake states its cursor"
                    self._check_stated(cursor, floor, committed)
                    if echo != session.outbox.head or delivery.gate != echo:
                        raise Violation(f"U2: the log is at {session.outbox.head}, the echo says {echo}")
                    self.gates[delivery.connection] = (echo, False)
                    self.pin = (cursor.stated.seq, echo) if cursor.stated.seq < echo else None
                    self.doors = session.outbox.head
                case Offered():
                    assert cursor is not None, "an upgrade states its cursor"
                    self._check_stated(cursor, floor, committed)
                    if session.outbox.head > head and cursor is not None:
                        self.pin = (cursor.stated.seq, session.outbox.head)
                case Serving() | Stated():
                    if cursor is not None:
                        self._check_stated(cursor, floor, committed)
                case Refused(refusal) if refusal.reason is Reason.CURSOR_EVICTED:
                    if cursor is not None and self._first_evicted(cursor, floor) is None:
                        raise Violation(
                            f"C5, M4: {cursor.stated} is refused as evicted, and nothing after it is"
                        )
                    if (head, state) != (session.outbox.head, session.door.state):
                        raise Violation("U1: what was refused as evicted has changed the session")
                case _:
                    pass
        if isinstance(input, Acked) and input.connection is not None and effects:
            conn = input.connection
            if isinstance(effects[0], Stated) and conn in self.gates:
                echo, acked = self.gates[conn]
                self.gates[conn] = (echo, acked or input.cursor.stated.seq >= echo)
        return effects

    def _check_stated(self, cursor: Cursor | None, floor: int, committed: int) -> None:
        """Whoever is answered with success has stated a proven cursor, which is covered (C3, U1, C5)."""
        assert cursor is not None
        stated, seq = cursor.stated, cursor.stated.seq
        if isinstance(stated, EventId):
            if seq > committed or stated.link != self.link_at(seq):
                raise Violation(f"C3: the cursor {stated} was never this log's, and was accepted")
        elif type(stated) is not Start:
            raise Violation(f"C2: the bare integer {seq} was accepted as a cursor")
        first = self._first_evicted(cursor, floor)
        if first is not None:
            raise Violation(f"U1, C5: success for the cursor {seq}, but event {first} is evicted")
        self.stated[stated.stream] = max(seq, self.stated.get(stated.stream, 0))
        if self.pin is not None and stated.stream == 0 and seq >= self.pin[1]:
            self.pin = None

    def _first_evicted(self, cursor: Cursor, floor: int) -> int | None:
        """The first event after a cursor that is evicted: of its stream, in the stream view (M4)."""
        stated, every = cursor.stated, self.session.view is View.SESSION
        for seq in range(stated.seq + 1, floor + 1):
            if every or self.history[seq - 1].stream == stated.stream:
                return seq
        return None

    def _begin(self) -> None:
        """What `server.sessions` does after every input: start a commit if there is none and one is due.

        At once, rather than when the loop gets to it: a commit that gathers more is the same as two in
        a row.
        """
        if self.commit is not None or not self.session.dirty:
            return
        self._evict()
        commit = self.session.take()
        record = write_record(self.session, "p", None) if commit.record else None
        write = as_write(commit, record, self.fence)
        self.commit = (commit, write, self.doors)
        self._check_write(write)

    def _check_write(self, write: Write) -> None:
        """Of one negotiation there is one `upgrade-accepted` (U7); of one request one answer (L7)."""
        answers: set[Any] = {_peek(t.data).id for t in self.history if t.event == "message"} - {None}
        offers = [s for s, t in enumerate(self.history, 1) if _is_offer(t.event, t.data) and s > self.doors]
        for block in blocks(write.segment):
            assert block.id is not None
            seq, data = parse_event_id(block.id).seq, block.data or b""
            if _is_offer(block.event, data) and seq > self.doors:
                offers.append(seq)
            elif block.event == "message":
                id = _peek(data).id
                if id is not None and id in answers:
                    raise Violation(f"L7: request {id} is settled twice")
                answers.add(id)
        if len(offers) > 1:
            raise Violation(f"U7: a second upgrade-accepted: events {offers}")

    def _evict(self) -> None:
        """Apply retention: what is evicted has a reason, and so has what is kept above a limit (L4)."""
        outbox, limits = self.session.outbox, self.session.limits
        before, fine = outbox.floor, limits.retain_events < 64 or limits.retain_bytes < 64 * 64
        self.session.evict(0.0)
        if outbox.floor < before:
            raise Violation("L3: the floor fell")
        size = outbox.pending + (0 if self.commit is None else len(self.commit[1].segment))
        size += sum(told.size for told in self.history[before:])
        for seq in range(before + 1, self.committed + 1):
            told, gone = self.history[seq - 1], seq <= outbox.floor
            large, many = size > limits.retain_bytes, outbox.head - (seq - 1) > limits.retain_events
            aged = seq <= self.old and limits.retain_seconds < AGED
            pinned = self.pin is not None and seq > self.pin[0]
            acked = self.stated.get(told.stream, 0) >= seq
            if gone and pinned and not large:
                raise Violation(
                    f"L4: event {seq} of the gap {self.pin} is evicted: the floor is {outbox.floor}"
                )
            if gone and not (acked or large or many or aged):
                raise Violation(
                    f"L4, M4: event {seq} of stream {told.stream} is evicted, unacked, below the limit"
                )
            if not gone:
                # Limits that are not tiny have steps, which take more than one event.
                if fine and (large or ((many or aged) and not pinned)):
                    raise Violation(f"L4: event {seq} is kept, above a limit")
                break
            size -= told.size

    # Answers, once durable --------------------------------------------------------------------------

    def _wait(
        self,
        rid: int,
        effects: list[Effect],
        rest: tuple[tuple[int, bytes], ...] = (),
        input: Listen | Upgrade | Handshake | None = None,
        tries: int = 0,
    ) -> None:
        after = self.commit is not None
        self._begin()
        waiters: list[tuple[Any, ...]] = []
        for effect in effects:
            match effect:
                case Refused(refusal):
                    waiters.append((rid, "refused", refusal))
                case Accepted():
                    waiters.append((rid, "accepted", rest))
                case Stated(ack):
                    waiters.append((rid, "stated", ack))
                case Offered(event, _, ticket, _):
                    waiters.append((rid, "offered", event, ticket))
                case Serving(delivery, echo):
                    waiters.append((rid, "serving", delivery.connection, delivery.medium, echo))
                case Ending(block):
                    waiters.append((rid, "ending", block))
                case Probing(delivery):
                    waiters.append((rid, "probing", delivery.connection, delivery.generation, input, tries))
                case Dispatch(number, _, envelope, incarnation):
                    waiters.append((0, "dispatch", number, envelope.id, incarnation))
        dispatched = [effect.incarnation for effect in effects if isinstance(effect, Dispatch)]
        if dispatched:
            waiters.append((0, "handed", dispatched[-1]))
        if after:
            self.later += tuple(waiters)
        elif self.commit is not None:
            self.waiting += tuple(waiters)
        else:
            for waiter in waiters:
                self._release(waiter)

    def _release(self, waiter: tuple[Any, ...]) -> None:
        rid, kind, *args = waiter
        match kind:
            case "refused":
                # It says where the server is when it is told.
                refused = self.session.refusal(args[0].reason, args[0].message)
                self._answer(rid, ("refused", refused.refusal))
            case "accepted":
                if args[0]:
                    self._out.append(("more", rid, args[0]))
                else:
                    self._answer(rid, ("accepted", self.session.inbox.durable))
            case "offered":
                self._answer(rid, ("offered", args[1]))
            case "serving":
                conn, medium, echo = args
                if medium is Medium.SOCKET and self.committed < echo:
                    raise Violation(f"L2, U2: the echo says {echo}, the log holds {self.committed}")
                self.attached |= {conn}
                self._out.append(("open", rid, conn, medium, echo))
            case "ending":
                self._answer(rid, ("ending", args[0]))
            case "probing":
                self._probe(rid, *args)
            case "dispatch":
                self._hand_over(*args)
            case "handed":
                self._wait(0, self._put(Handed(args[0])))
            case _:
                self._answer(rid, (kind,))

    def _answer(self, rid: int, response: tuple[Any, ...]) -> None:
        self._out.append(("answer", rid, response))

    def _probe(
        self, rid: int, conn: int, generation: int, input: Listen | Upgrade | Handshake, tries: int
    ) -> None:
        ask = Ask(rid, input, tries + 1, conn, generation, False)
        if ConnectionId(conn) not in self.session.connections:
            self._again(ask, False)  # no live process behind the binding
            return
        self.asks += (ask,)
        self.session.connections[ConnectionId(conn)].probe = "p"

    def _hand_over(self, number: int, id: Any, incarnation: int) -> None:
        """Hand a message to the backend, once it is durable (N1)."""
        if self.session.reason is not None or incarnation != self.session.carried.incarnation:
            return
        stored = run(self.log.load(KEY))
        assert stored is not None
        if id in self.handed:
            raise Violation(f"L6: request {id} is handed to the backend twice")
        if stored.dispatched < number or stored.received < number:
            raise Violation(f"N1: message {number} is handed over before that is durable")
        if id is not None:
            self.handed += (id,)
            self.has += (id,)

    # Delivery ---------------------------------------------------------------------------------------

    def _on_feed(self, conn: int) -> None:
        """One feed, until it waits: what `server.feed` does in one go while its socket takes everything.

        That several writes are one step hides nothing: each depends on the machine alone, which nothing
        else touches in between; a machine that is touched earlier is another path.
        """
        delivery = self.session.connections[ConnectionId(conn)]
        while True:
            step = self.session.poll(delivery, 0.0)
            self.told.append(str(step))
            match step:
                case Deliver():
                    self._write(conn, delivery, step)
                case Finish(control, code):
                    self._out.append(("write", conn, decode(control)))
                    self._finish(conn, code)
                    return
                case Wait():
                    return

    def _on_poll(self, conn: int) -> None:
        """The first half of a feed's step, where the log takes its time to answer."""
        step = self.session.poll(self.session.connections[ConnectionId(conn)], 0.0)
        self.told.append(str(step))
        match step:
            case Deliver():
                self.reads += ((conn, step),)
            case Finish(control, code):
                self._out.append(("write", conn, decode(control)))
                self._finish(conn, code)
            case Wait():
                pass

    def _on_write(self, conn: int) -> None:
        """The second half: the log has answered."""
        step = next(step for c, step in self.reads if c == conn)
        self.reads = tuple(r for r in self.reads if r[0] != conn)
        self._write(conn, self.session.connections[ConnectionId(conn)], step)

    def _on_overdue(self, conn: int) -> None:
        """The ack window is over (U4)."""
        delivery = self.session.connections[ConnectionId(conn)]
        step = self.session.poll(delivery, delivery.ack_deadline)
        self.told.append(str(step))
        assert isinstance(step, Finish)
        self._finish(conn, step.code)

    def _write(self, conn: int, delivery: Delivery, step: Deliver) -> None:
        data, last = b"", step.after
        if step.after < step.upto:
            with suppress(BelowFloorError):  # evicted meanwhile: the next look says what that means
                data, last = run(self.log.read(KEY, step.after, step.upto, CHUNK))
            data = _filtered(data, delivery)
        if delivery.close is not None:
            return  # fenced while the log was read: what it would write is void (B8)
        items = decode(step.control) + decode(data)
        for sent in items:
            block = sent.block
            if block is not None and block.id is not None and block.data:
                self._check_written(conn, delivery, parse_event_id(block.id).seq)
        self._out.append(("write", conn, items))
        self.session.advance(delivery, last, 0.0)

    def _check_written(self, conn: int, delivery: Delivery, seq: int) -> None:
        if seq > self.committed:
            raise Violation(f"L2: event {seq} is written, the log holds {self.committed}")
        gate = self.gates.get(conn)
        if gate is not None and not gate[1] and seq > gate[0]:
            raise Violation(f"U4: event {seq} is written before the ack of {gate[0]}")
        door = self.session.door
        at = door.event if door.state in _PASSING else None
        if delivery.medium is Medium.EVENTS and at is not None and seq > at:
            raise Violation(f"U10: an event stream carries event {seq}, above U = {at}")

    def _finish(self, conn: int, code: int) -> None:
        position = self.session.connections[ConnectionId(conn)].position
        if code == CLOSE_EVICTED and position >= self.session.outbox.floor:
            raise Violation(
                f"L3, U1: connection {conn} is closed as evicted, at {position}, which is retained"
            )
        self._out.append(("close", conn, code))
        self._on_gone(conn)

    # After every step -------------------------------------------------------------------------------

    def _settle(self, before: Server) -> None:
        """Check the state, tell of fences, and take time out of it."""
        session = self.session
        live: list[int] = []
        held = False
        for delivery in session.connections.values():
            delivery.written_at = 0.0
            if delivery.medium is not Medium.SOCKET:
                continue
            held = held or delivery.generation == session.door.generation
            was = before.delivery(delivery.connection)
            if delivery.close == CLOSE_FENCED and was is not None and was.close is None:
                self._out.append(("fenced", delivery.connection))
            if delivery.close is None:
                live.append(delivery.connection)
        if len(live) > 1:
            raise Violation(f"§11.3: several sockets may write: {live}")
        bound = session.door.state is SessionState.WEBSOCKET_BOUND
        if bound and not held:
            raise Violation("§6: bound, but no socket holds the session")
        if live and not bound and session.door.state is not SessionState.TERMINATED:
            raise Violation("B7, B8: a socket may write, but holds nothing")
        if session.reason is not None and self.committed == session.outbox.head:
            unsettled = self.accepted - {_peek(t.data).id for t in self.history if t.event == "message"}
            if unsettled:
                raise Violation(f"L7: the session is over, and requests {set(unsettled)} were never settled")
        if session.door.state in _PASSING and self.committed == session.outbox.head:
            for conn in self.attached:
                delivery = session.connections[ConnectionId(conn)]
                if delivery.medium is Medium.EVENTS and delivery.stream is None and conn not in self.due:
                    raise Violation(f"B1, U10: an idle event stream at the boundary, at {delivery.position}")


_peek = cache(peek)

_PASSING: Final = frozenset({SessionState.UPGRADE_ACCEPTED_PENDING, SessionState.WEBSOCKET_BOUND})


def _is_offer(event: str, data: bytes) -> bool:
    return event == "upgrade-accepted" and msgspec.json.decode(data)["ticket"] is not None
