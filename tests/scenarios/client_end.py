"""The client of a scenario: its machine, an application, and what `gapless.client` does around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, assert_never

from gapless.errors import GaplessError
from gapless.protocol.block import Block
from gapless.protocol.client import Client, Phase
from gapless.protocol.incoming import Event
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.moves import (
    Arrived,
    CloseSocket,
    CloseStream,
    Delete,
    Delivered,
    Effect,
    Failed,
    Get,
    Input,
    Knock,
    Negotiate,
    Offered,
    Open,
    Opened,
    Over,
    Post,
    PostAck,
    Received,
    Refused,
    Send,
    Settle,
    SocketClosed,
    SocketOpened,
    Start,
    StreamEnded,
    StreamOpened,
    Submit,
    Tick,
)
from gapless.protocol.phases import Policy
from gapless.protocol.refusal import Refusal
from gapless.protocol.settings import Limits
from tests.scenarios.wire import Link, Request

if TYPE_CHECKING:
    from tests.scenarios.world import World

__all__ = ["ClientEnd"]


class _Machine(Client):
    """The machine, with an ear to what it finds wrong on a connection: it is raised only the second time."""

    world: World

    def _fault(self, error: GaplessError, now: float) -> list[Effect]:
        self.world.tell("client", f"{type(error).__name__}: {self.world.words.text(str(error))}")
        return super()._fault(error, now)


class ClientEnd:
    """The client machine, connected. It alone acts; an `other` on the wire only takes what comes."""

    def __init__(self, world: World, policy: Policy, steps: Literal[1, 2]) -> None:
        self.world = world
        self.machine = _Machine(policy, steps=steps, process="client")
        self.machine.world = world
        self.gone = False
        self.takes: int | None = None
        """How many messages the application will take yet; `None` for any number."""
        self._hand: Event | None = None
        self._wanted = False
        self._cursor = 0

    def __str__(self) -> str:
        machine = self.machine
        if self.gone or machine.phase is Phase.OVER:
            return "client gone" if self.gone else "client over"
        return f"client {machine.phase.value}, cursor {self._seq}"

    @property
    def _seq(self) -> int:
        return 0 if self.machine.cursor is None else self.machine.cursor.seq

    def start(self, limits: Limits) -> None:
        """Open the session, and ask for its event stream."""
        self.put(Start())
        first = self.world.words.ids[0]
        advertised, timers = limits.advertised_limits(), limits.advertised_timers()
        self.put(Opened(self.machine.attempt, "session", first, advertised, timers))

    def put(self, input: Input) -> None:
        """One input into the machine, and its effects out into the world."""
        if self.gone:
            return
        before = self.machine.phase
        effects = self.machine.handle(input, self.world.now)
        if self.machine.phase is not before:
            self.world.tell("client", f"{before.value} → {self.machine.phase.value}{self._rest()}")
        for effect in effects:
            self._perform(effect)

    def _rest(self) -> str:
        deadline = self.machine.deadline
        if self.machine.phase is not Phase.RESTING or deadline is None:
            return ""
        return f" for {deadline - self.world.now:g} s"

    def tell_cursor(self) -> None:
        """Tell how far the application has come since this was told last."""
        if self._seq != self._cursor and self.machine.phase is not Phase.OVER:
            before, self._cursor = self._cursor, self._seq
            self.world.tell("client", f"cursor {before} → {self._cursor}")

    # Effects --------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Open():
                pass
            case Get(attempt, cursor):
                self._send("events", attempt, cursor=str(cursor))
            case Negotiate(attempt, cursor, nonce):
                self._send("upgrade", attempt, cursor=str(cursor), nonce=nonce)
            case Knock(attempt, cursor, ticket):
                self._send("handshake", attempt, cursor=str(cursor), ticket=ticket)
            case Post(attempt, messages):
                self._send("messages", attempt, messages=tuple((m.number, m.data) for m in messages))
            case PostAck(cursor):
                self._send("ack", cursor=str(cursor))
            case Delete():
                self._send("delete")
            case Send(attempt, frame):
                link = self._link(attempt)
                if link is not None:
                    self.world.up(link, frame)
            case CloseStream(attempt) | CloseSocket(attempt):
                link = self._link(attempt)
                if link is not None:
                    self.world.end_up(link)
            case Settle(id, _, _, data):
                self.world.tell("client", f"request {id} fails: {data['reason']}")
            case Over(error):
                told = "leaves" if error is None else f"ends with {type(error).__name__}: {error.code}"
                self.world.tell("client", told)
            case _:
                assert_never(effect)

    def _send(self, kind: str, attempt: int = 0, **stated: Any) -> None:
        self.world.send(Request("client", kind, attempt, **stated))

    def _link(self, attempt: int) -> Link | None:
        return next(
            (k for k in self.world.links if k.open and k.request.attempt == attempt and _own(k.request)), None
        )

    # What comes of them ---------------------------------------------------------------------------

    def refused(self, request: Request, refusal: Refusal | None, status: int = 0) -> None:
        """A request was refused: by the server, or, without a refusal, by something on the way."""
        if _own(request) and request.attempt:
            status = status if refusal is None else refusal.row.status
            self.put(Refused(request.attempt, status, refusal, 1.0 if status == 503 else None))

    def unanswered(self, request: Request) -> None:
        """A request got no answer, and will get none."""
        if _own(request) and request.attempt:
            self.put(Failed(request.attempt, "no answer"))

    def received(self, request: Request, number: int) -> None:
        """202 to messages."""
        if _own(request):
            self.put(Received(request.attempt, number))

    def offered(self, request: Request, ticket: str | None) -> None:
        """200 to a negotiation."""
        if _own(request):
            self.put(Offered(request.attempt, ticket))

    def listening(self, link: Link) -> None:
        """200 to a GET."""
        if _own(link.request):
            self.put(StreamOpened(link.request.attempt))

    def bound(self, link: Link, echo: int | None) -> None:
        """101, and what came of its header."""
        if not _own(link.request):
            return
        self.put(SocketOpened(link.request.attempt, echo))
        if link.open and self.machine.socket != link.request.attempt:
            self.world.end_up(link)

    def ending(self, request: Request, blocks: list[Block]) -> None:
        """200 with one block, and the end (B1)."""
        if _own(request):
            self.put(StreamOpened(request.attempt))
            for block in blocks:
                self.put(Arrived(request.attempt, block))
            self.put(StreamEnded(request.attempt))

    def reads(self, link: Link) -> bool:
        """Whether what comes on a connection is read now (U10)."""
        return link.socket or not _own(link.request) or self.machine.reading

    def arrived(self, link: Link, blocks: list[Block]) -> None:
        """Something came on a connection: blocks, or a comment."""
        if _own(link.request):
            for block in blocks or [None]:
                self.put(Arrived(link.request.attempt, block))

    def ended(self, link: Link, code: int) -> None:
        """A connection ended, or broke."""
        if _own(link.request):
            attempt = link.request.attempt
            self.put(SocketClosed(attempt, code) if link.socket else StreamEnded(attempt))

    # The application ------------------------------------------------------------------------------

    def call(self, id: int, method: str) -> None:
        """The application sends a request."""
        data = b'{"jsonrpc":"2.0","id":%d,"method":"%s"}' % (id, method.encode())
        self.put(Submit(data, peek(data)))

    def reply(self, id: str) -> None:
        """The application answers a question."""
        data = b'{"jsonrpc":"2.0","id":%s,"result":{}}' % (id if id.isdecimal() else f'"{id}"').encode()
        self.put(Submit(data, peek(data)))

    def accept(self) -> bool:
        """The application takes an event, if there is one and it will; whether it did."""
        if self.gone:
            return False
        if self._hand is None:
            self._hand = self.machine.take()
            if self._hand is None:
                return False
            self._wanted = self.machine.wanted(self._hand)
        if self._wanted:
            if self.takes == 0:
                return False
            if self.takes is not None:
                self.takes -= 1
            self._answered(self._hand)
        self._hand = None
        self.put(Delivered())
        return True

    def _answered(self, event: Event) -> None:
        envelope = peek(event.data)
        if envelope.kind is Kind.RESPONSE:
            self.world.tell("client", f"request {envelope.id} is answered")

    # Time -----------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When the machine is to be told the time."""
        return None if self.gone else self.machine.deadline

    def due(self) -> bool:
        """Tell the machine the time if it waits for it; whether it did."""
        deadline = self.deadline
        if deadline is None or self.world.now < deadline:
            return False
        self.put(Tick())
        return True


def _own(request: Request) -> bool:
    return request.who == "client"
