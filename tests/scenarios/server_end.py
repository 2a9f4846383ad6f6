"""The server of a scenario: its machine, a log in memory, and what `gapless.server` does around them."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import structs

from gapless.errors import MalformedError
from gapless.log.base import SessionKey
from gapless.log.memory import MemoryLog
from gapless.protocol.block import BlockDecoder
from gapless.protocol.carried import Waiting
from gapless.protocol.cursor import parse_cursor, parse_event_id
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
from gapless.protocol.refusal import Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from gapless.server.intake import message_input, message_number
from gapless.server.live import as_write
from gapless.server.sessions import own
from tests.scenarios.wire import Link, Request
from tests.scenarios.words import LINK0

if TYPE_CHECKING:
    from tests.scenarios.world import World

__all__ = ["ServerEnd"]

_KEY: Final = SessionKey(b"session")
_PROBES: Final = 3  # as in gapless.server.live
_ALL: Final = 1 << 30

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Asking:
    """A request that waits for a probe's verdict (B6)."""

    request: Request
    input: Listen | Upgrade | Handshake
    left: int
    probed: Delivery
    deadline: float


class ServerEnd:
    """The server machine, made durable and connected."""

    def __init__(self, world: World, limits: Limits) -> None:
        self.world = world
        self.session = Session(View.SESSION, LINK0, limits, "memory", 0.0)
        self.log = MemoryLog(clock=lambda: world.now)
        _run(self.log.create(_KEY, write_record(self.session, "p", None), LINK0))
        self.open: dict[Any, str | None] = {}
        """Requests that the backend has not answered: ID and method."""
        self.version = 1
        """What the backend says that it is; the one that runs, or the next."""
        self.takes = True
        """Whether the backend takes what it is given."""
        self._fence = 0
        self._asking: list[_Asking] = []
        self._connections = count(1)
        self._offers = 0

    def __str__(self) -> str:
        door, outbox, inbox = self.session.door, self.session.outbox, self.session.inbox
        parts = ["server " + door.state.name]
        if door.event is not None:
            parts.append(f"U={door.event}")
        first, last = outbox.floor + 1, outbox.committed
        parts.append(
            f"log {first}–{last}" if first < last else f"log {first}" if first == last else "log empty"
        )
        parts.append(f"acked {outbox.acks.get(0, 0)}")
        if inbox.open:
            parts.append("open " + " ".join(str(id) for id in inbox.open))
        if self.session.carried.waiting:
            parts.append("waiting " + " ".join(str(m.number) for m in self.session.carried.waiting))
        return ", ".join(parts)

    # Inputs ---------------------------------------------------------------------------------------

    def put(self, *inputs: Input) -> list[Effect]:
        """Handle inputs, and make them durable in one commit; the last one's effects are returned."""
        before = self.session.door.state
        effects: list[Effect] = []
        for input in inputs:
            effects = self.session.handle(input, self.world.now)
        self._commit()
        state = self.session.door.state
        if state is not before:
            self.world.tell("server", f"{before.name} → {state.name}")
        dispatched = [effect for effect in effects if isinstance(effect, Dispatch)]
        for effect in dispatched:
            self._hand_over(effect)
        if dispatched and self.takes:
            self.put(Handed(dispatched[-1].incarnation))
        if dispatched and dispatched[-1].number == 0 and dispatched[-1].envelope.kind is Kind.REQUEST:
            self.answer(dispatched[-1].envelope.id)
        return [effect for effect in effects if not isinstance(effect, Dispatch)]

    def _hand_over(self, effect: Dispatch) -> None:
        envelope = effect.envelope
        what = envelope.method
        if envelope.kind is Kind.RESPONSE:
            what = f"answer to {envelope.id}"
        elif envelope.kind is Kind.REQUEST:
            self.open[envelope.id] = envelope.method
            what = f"request {envelope.id}" if effect.number else what
        name = f"message {effect.number}" if effect.number else "replay"
        self.world.tell("server → backend", f"{name}: {what}")

    def _commit(self) -> None:
        session = self.session
        if not session.dirty:
            return
        session.evict(self.world.now)
        commit = session.take()
        _run(
            self.log.commit(
                _KEY,
                as_write(commit, write_record(session, "p", None) if commit.record else None, self._fence),
            )
        )
        session.confirm(commit)
        blocks = BlockDecoder(_ALL).feed(commit.segment.data)
        self.world.words.ids += [parse_event_id(block.id or "") for block in blocks]

    def emit(self, *messages: bytes) -> None:
        """The backend emits messages; they share a commit."""
        incarnation = self.session.carried.incarnation
        self.put(*(Emitted(data, peek(data), None, incarnation) for data in messages))

    def answer(self, id: Any) -> None:
        """The backend answers a request: with what it is, if it is asked that."""
        what = b""
        if self.open.pop(id) == "initialize":
            what = (
                b'"serverInfo":{"name":"backend","version":"%d"},"capabilities":{"tools":{}}' % self.version
            )
            self.world.tell("backend", f"says that it is version {self.version}")
        self.emit(b'{"jsonrpc":"2.0","id":%s,"result":{%s}}' % (msgspec.json.encode(id), what))

    def backend_goes_on(self) -> None:
        """The backend takes what it was given, and whatever comes."""
        self.takes = True
        self.put(Handed(self.session.carried.incarnation))

    def backend_dies(self, message: str = "", *, taken_over: bool = False) -> None:
        """The backend is gone, and the next one begins, if there is to be one (N2)."""
        self.open.clear()
        self.takes = True
        self.put(Lost(message, taken_over))
        carried = self.session.carried
        numbers = sorted(n for n in carried.orders.values() if n <= self.session.dispatched)
        entries = [_run(self.log.entries(_KEY, number - 1, 1))[0] for number in numbers]
        self.put(Revive(tuple(Waiting(e.number, e.data, peek(e.data)) for e in entries)))

    def restarts(self) -> None:
        """The process dies with its backend and its connections; another finds the session in the log."""
        self._asking.clear()
        for link in self.world.links:
            link.serving = False
            if link.open:
                self.world.broken(link, "both")
        stored = _run(self.log.load(_KEY))
        assert stored is not None
        now = self.world.now
        self.session, _, self._fence = _run(
            own(self.log, stored, self.session.limits, None, now=now, unix=now)
        )
        if self.session.reason is None:
            self.backend_dies(taken_over=True)

    def end(self, reason: Reason) -> None:
        """End the session."""
        self.put(End(reason, ""))

    # Requests -------------------------------------------------------------------------------------

    def serve(self, request: Request, *, eaten: bool = False) -> None:
        """Take a request; what the endpoint refuses by itself comes first (§8)."""
        over = self.session.ended()
        if over is not None:
            self._refuse(request, over)
            return
        try:
            cursor = None if request.cursor is None else self._cursor(request.cursor)
        except MalformedError as error:
            self._refuse(request, self.session.refusal(Reason.MALFORMED, str(error)))
            return
        if eaten:
            self._refuse(request, self.session.refusal(Reason.UPGRADE_UNAVAILABLE, "the upgrade was eaten"))
            return
        conn = ConnectionId(next(self._connections))
        match request.kind:
            case "events":
                self._ask(request, Listen(conn, cursor))
            case "upgrade":
                assert cursor is not None
                self._ask(request, Upgrade(cursor, request.nonce, f"t{self._offers + 1}", "/events"))
            case "handshake":
                assert cursor is not None
                self._ask(request, Handshake(conn, cursor, request.ticket, "own", "/events"))
            case "ack":
                assert cursor is not None
                self._answer(request, self.put(Acked(cursor))[0])
            case "messages":
                self._answer(request, self._several(request))
            case _:
                self.end(Reason.SESSION_ENDED)
                self.world.reply(request, "answer", "204", lambda: None)

    def _cursor(self, text: str) -> Cursor:
        stated = parse_cursor(text)
        return Cursor(stated, _run(self.log.link(_KEY, stated.seq)))

    def _several(self, request: Request) -> Effect:
        for number, data in request.messages:
            effect = self._take(number, data, request.who, None)[-1]
            if isinstance(effect, Refused):
                return effect
        return Accepted(self.session.inbox.received)

    def _take(self, number: int, data: bytes, process: str, conn: ConnectionId | None) -> list[Effect]:
        known = None
        if number <= self.session.inbox.received:
            (entry,) = _run(self.log.entries(_KEY, number - 1, 1))
            known = Known(entry.digest, not entry.data)
        limit = self.session.limits.max_message_bytes
        return self.put(
            message_input(data, limit, number=number, process=process, known=known, connection=conn)
        )

    def _ask(self, request: Request, input: Listen | Upgrade | Handshake, left: int = _PROBES) -> None:
        """Put in what may have to wait for a probe; then it is put in again, with the verdict (B6)."""
        (effect,) = self.put(input)
        if not isinstance(effect, Probing):
            self._answer(request, effect)
        elif not left:
            self._refuse(request, self.session.refusal(Reason.WEBSOCKET_BOUND, "other sockets take it"))
        else:
            effect.delivery.probe = "p"
            deadline = self.world.now + self.session.limits.probe_timeout
            self._asking.append(_Asking(request, input, left - 1, effect.delivery, deadline))

    def _judge(self, asking: _Asking, alive: bool) -> None:
        self._asking.remove(asking)
        verdict = Verdict(asking.probed.generation, alive)
        self._ask(asking.request, structs.replace(asking.input, verdict=verdict), asking.left)

    def _answer(self, request: Request, effect: Effect) -> None:
        world, client = self.world, self.world.client
        match effect:
            case Refused():
                self._refuse(request, effect)
            case Accepted():
                received = self.session.inbox.durable
                world.reply(
                    request, "answer", f"202 received {received}", lambda: client.received(request, received)
                )
            case Stated(ack):
                world.reply(request, "answer", f"200 ack={ack}", lambda: None)
            case Offered(event, negotiation, ticket):
                self._offers = int((ticket or "t0")[1:])
                text = f"200 event={event} negotiation={negotiation} ticket={ticket}"
                world.reply(request, "acceptance", text, lambda: client.offered(request, ticket))
            case Ending(block):
                blocks = BlockDecoder(_ALL).feed(block)
                text = f"200 {world.words.blocks(blocks)}, end"
                world.reply(request, "200", text, lambda: client.ending(request, blocks))
            case Serving(delivery, committed):
                socket = delivery.medium is Medium.SOCKET
                link = Link(delivery.connection, request, delivery, socket, stalled=world.stalling)
                world.stalling = False
                world.links.append(link)
                if socket:
                    told = f"101 X-MCP-Resume-Cursor: {committed}"
                    world.reply(request, "101", told, lambda: client.bound(link, world.echo(committed)), link)
                else:
                    world.reply(request, "200", "200 event stream", lambda: client.listening(link), link)
            case other:
                raise AssertionError(other)

    def _refuse(self, request: Request, refused: Refused) -> None:
        # It says where the server is when it is told: by then what its input changed is durable.
        refusal = self.session.refusal(refused.refusal.reason, refused.refusal.message).refusal
        text = self.world.words.refusal(refusal)
        self.world.reply(request, "answer", text, lambda: self.world.client.refused(request, refusal))

    # Connections ----------------------------------------------------------------------------------

    def feed(self) -> None:
        """Write on every connection what may be written now."""
        for link in list(self.world.links):
            while link.serving and not link.stalled:
                match self.session.poll(link.delivery, self.world.now):
                    case Deliver(control, after, upto):
                        data, last = b"", after
                        if after < upto:
                            data, last = _run(self.log.read(_KEY, after, upto, _ALL))
                        for part in (control, data) if link.socket else (control + data,):
                            if part:
                                self.world.down(link, part)
                        self.session.advance(link.delivery, last, self.world.now)
                    case Finish(control, code):
                        if control:
                            self.world.down(link, control)
                        self.world.end_down(link, code)
                        self.gone(link)
                    case Wait(until):
                        link.until = until
                        break

    def heard(self, link: Link, frame: bytes) -> None:
        """A frame came in on a socket: what it says, and that the socket lives (B6)."""
        for block in BlockDecoder(_ALL).feed(frame):
            effects: list[Effect] | None = None
            if block.event == "message":
                number = message_number(block.id) or 0
                effects = self._take(number, block.data or b"", link.request.who, link.conn)
            elif block.event == "cursor-ack":
                stated: str = msgspec.json.decode(block.data or b"")["cursor"]
                effects = self.put(Acked(self._cursor(stated), link.conn))
            if effects == []:
                self.world.tell("server", f"takes no {block.event} from an older generation")
        if link.delivery.close is None:
            self._learn(link)

    def gone(self, link: Link) -> None:
        """A connection is gone."""
        if link.serving:
            link.serving = False
            self.put(Dropped(link.conn))
            self._learn(link)  # whoever probes it learns that by asking again

    def _learn(self, link: Link) -> None:
        for asking in [a for a in self._asking if a.probed.connection == link.conn]:
            self._judge(asking, alive=True)

    # Time -----------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When something is due next."""
        times = [link.until for link in self.world.links if link.serving and not link.stalled]
        times += [asking.deadline for asking in self._asking]
        session = self.session
        idle = not session.connections and not session.inbox.working
        if idle and session.door.state is not SessionState.TERMINATED:
            times.append(session.idle_since + session.limits.session_expiry)
        return min(times, default=None)

    def due(self) -> bool:
        """Judge one probe whose time is over; whether there was one."""
        asking = next((a for a in self._asking if self.world.now >= a.deadline), None)
        if asking is None:
            return False
        self._judge(asking, alive=False)
        return True

    def look_after(self) -> None:
        """What the janitor does: expire the session, apply retention."""
        if self.session.expired(self.world.now):
            self.end(Reason.SESSION_EXPIRED)
        self.session.evict(self.world.now)
        self._commit()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the memory log, which never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the memory log suspended")
