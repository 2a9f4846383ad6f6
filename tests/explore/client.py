"""The client of an explored world: the real machine, and an application that takes its time."""

from __future__ import annotations

from typing import Any, Final

from gapless.protocol.client import Client, Phase, Retry
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.incoming import Event
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.moves import (
    Arrived,
    Delivered,
    Effect,
    Failed,
    Get,
    Input,
    Knock,
    Move,
    Negotiate,
    Offered,
    Opened,
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
from gapless.protocol.settings import Limits
from tests.explore.parts import Item, Violation, freeze
from tests.explore.server import LINK0

__all__ = ["NAMES", "Peer", "Peers", "request"]

START_ID: Final = EventId(0, 0, LINK0)
_PARKED: Final = 1e9
_TIMERS: Final = {"wake": "_wake", "again": "wake", "ack": "_ack_at"}
_AWAITING: Final = frozenset({Phase.OPENING, Phase.LISTENING, Phase.NEGOTIATING, Phase.KNOCKING})
_LISTENS: Final = frozenset({Phase.STREAMING, Phase.BRIDGING, Phase.BOUND})

# No delay but such as the model makes itself; few attempts, so that giving up is within reach (§11.5).
RETRY: Final = Retry(first=1.0, most=1.0, attempts=3, door_first=0.0, door_most=0.0)


NAMES: Final = ("client", "other")


def request(id: int) -> bytes:
    """A request of the application."""
    return b'{"jsonrpc":"2.0","id":%d,"method":"tools/call"}' % id


class Peers:
    """All states of one exploration's client, each once.

    `who` is 0 for the client that opened the session, 1 for another one that was given its token.
    """

    def __init__(
        self, who: int, limits: Limits, ends: frozenset[str], *, crashes: bool, **options: Any
    ) -> None:
        self.who = who
        self.limits = limits
        self.ends = ends
        self.ended: set[str] = set()
        """The ends that were reached."""
        self.crashes = crashes
        self.options = options
        self.table: dict[Any, Peer] = {}

    def start(self) -> tuple[Peer, tuple[Effect, ...]]:
        """A client that has just opened its session, or was given one, and asks for its event stream."""
        peer = Peer(self)
        if self.who:
            peer.machine = self.machine(session="s", cursor=START_ID)
            effects = peer.machine.handle(Start(), 0.0)
        else:
            peer.machine = self.machine()
            peer.machine.handle(Start(), 0.0)
            limits, timers = self.limits.advertised_limits(), self.limits.advertised_timers()
            effects = peer.machine.handle(Opened(peer.machine.attempt, "s", START_ID, limits, timers), 0.0)
        peer.settle(effects)
        return self.intern(peer), tuple(effects)

    def machine(self, process: int = 1, **more: Any) -> Client:
        """A new machine, of a new process."""
        options = {"process": f"{NAMES[self.who]}-{process}", "retry": RETRY} | self.options | more
        machine = Client(**options)
        if "session" in options:
            machine.limits = self.limits.advertised_limits()
        return machine

    def intern(self, peer: Peer) -> Peer:
        """The one client in this state."""
        key = peer.freeze()
        found = self.table.get(key)
        if found is None:
            peer.number = len(self.table)
            peer.look()
            found = self.table[key] = peer
        return found


class Peer:
    """One state of the client. Read it freely; change it only by `step`, which returns another.

    Attributes:
        seen: events that the application has processed; `link` that of the last one.
        hand: the event that it has taken and not yet accepted.
        asked: requests of this process; `replied` those of them that got their one answer.
        saved: the cursor on disk, for a process that comes after a crash (C4).
    """

    machine: Client

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.name = NAMES[peers.who]
        self.number = -1
        self.process = 1
        self.seen = 0
        self.link: Link = LINK0
        self.hand: Event | None = None
        self.asked: tuple[int, ...] = ()
        self.replied: frozenset[int] = frozenset()
        self.saved: EventId = START_ID
        self.renumber: tuple[tuple[int, int], ...] = ()
        self.memo: dict[tuple[Any, ...], tuple[Peer, tuple[Effect, ...]]] = {}
        self.told: list[str] = []

    def step(self, *act: Any) -> tuple[Peer, tuple[Effect, ...]]:
        """Take one step; return the client after it and what it wants done."""
        found = self.memo.get(act)
        if found is None:
            draft = self._fork()
            effects = getattr(draft, "_on_" + act[0])(*act[1:])
            draft.settle(effects)
            found = self.memo[act] = (self.peers.intern(draft), tuple(effects))
        return found

    def explain(self, *act: Any) -> list[str]:
        """What the machine says in this step, for a trace."""
        draft = self._fork()
        try:
            draft.settle(getattr(draft, "_on_" + act[0])(*act[1:]))
        except Exception as error:  # it is what the trace is about
            draft.told.append(f"{type(error).__name__}: {error}")
        return draft.told

    def _fork(self) -> Peer:
        draft = Peer(self.peers)
        draft.machine = self.machine.copy()
        draft.process, draft.seen, draft.link, draft.hand = self.process, self.seen, self.link, self.hand
        draft.asked, draft.replied, draft.saved = self.asked, self.replied, self.saved
        draft.renumber = self.renumber
        return draft

    def freeze(self) -> Any:
        """The canonical form."""
        return (
            freeze(self.machine),
            self.process,
            self.seen,
            self.link,
            self.asked,
            self.replied,
            self.saved if self.peers.crashes else None,
        )

    def __str__(self) -> str:
        machine = self.machine
        hand = "" if self.hand is None else f", event {self.hand.id.seq} in hand"
        return (
            f"{self.name} {machine.phase.value}, processed {self.seen}{hand}, arrived {self.anchor}, "
            f"received {machine.outgoing.received}/{machine.outgoing.numbered}, timers {self.timers}, "
            f"failures {machine._failures}"  # pyright: ignore[reportPrivateUsage]
        )

    def look(self) -> None:
        """Note what the world asks of a client at every turn."""
        machine = self.machine
        self.phase = machine.phase
        self.over = machine.phase is Phase.OVER
        self.reading = machine.reading
        self.full = machine.full
        self.listens = machine.phase in _LISTENS
        self.timers = tuple(n for n in _TIMERS if _timer(machine, n) is not None)
        self.anchor = machine.incoming.anchor.seq if machine.incoming.anchor is not None else 0
        self.quiet = self.hand is None and not self.over
        live = {machine.stream, machine.socket, machine.sending._posted_on}  # pyright: ignore[reportPrivateUsage]
        if machine.phase in _AWAITING:
            live.add(machine.attempt)
        numbers = {n: at for at, n in enumerate(sorted(n for n in live if n), 1)}
        self.renumber = tuple(numbers.items()) if any(n != at for n, at in numbers.items()) else ()
        self.settled = not machine.outgoing.waiting and machine.outgoing.received == machine.outgoing.numbered

    # The network --------------------------------------------------------------------------------------

    def _put(self, input: Input, now: float = 0.0) -> list[Effect]:
        effects = self.machine.handle(input, now)
        self.told.append(f"{input} → {effects}")
        return effects

    def _on_open(self, attempt: int, socket: bool, echo: int | None) -> list[Effect]:
        return self._put(SocketOpened(attempt, echo) if socket else StreamOpened(attempt))

    def _on_block(self, attempt: int, item: Item) -> list[Effect]:
        return self._put(Arrived(attempt, item.block))

    def _on_closed(self, attempt: int, socket: bool, code: int) -> list[Effect]:
        return self._put(SocketClosed(attempt, code) if socket else StreamEnded(attempt))

    def _on_failed(self, attempt: int) -> list[Effect]:
        return self._put(Failed(attempt, "no answer"))

    def _on_eaten(self, attempt: int) -> list[Effect]:
        return self._put(Refused(attempt, 426, None))

    def _on_answered(self, attempt: int, response: tuple[Any, ...]) -> list[Effect]:
        match response:
            case ("refused", refusal):
                return self._put(Refused(attempt, refusal.row.status, refusal, None))
            case ("accepted", received):
                return self._put(Received(attempt, received))
            case ("reset",):
                return self._put(Failed(attempt, "no answer"))
            case ("offered", ticket):
                return self._put(Offered(attempt, ticket))
            case other:
                raise AssertionError(other)

    # Time ---------------------------------------------------------------------------------------------

    def _on_tick(self, name: str) -> list[Effect]:
        """One timer is due. Which comes first is left open: any order of them is explored."""
        machine = self.machine
        for timer in _TIMERS:
            _park(machine, timer, 0.0 if timer == name else _PARKED)
        machine._heard = 0.0  # pyright: ignore[reportPrivateUsage]
        return self._put(Tick())

    def _on_quiet(self) -> list[Effect]:
        """Nothing was heard for too long (C8)."""
        for timer in _TIMERS:
            _park(self.machine, timer, _PARKED)
        return self._put(Tick(), 2 * self.machine.keepalive)

    def _on_renumber(self) -> list[Effect]:
        """Live attempts get the lowest numbers in the same order: only that order matters."""
        machine, numbers = self.machine, dict(self.renumber)
        machine.stream = numbers.get(machine.stream or 0)
        machine.socket = numbers.get(machine.socket or 0)
        posted = machine.sending._posted_on  # pyright: ignore[reportPrivateUsage]
        machine.sending._posted_on = numbers.get(posted, 0)  # pyright: ignore[reportPrivateUsage]
        machine.attempt = numbers.get(machine.attempt, 0)
        return []

    # The application ----------------------------------------------------------------------------------

    def _on_accept(self) -> list[Effect]:
        """The application has processed the event in its hands."""
        assert self.hand is not None
        return self._processed(self.hand)

    def _processed(self, event: Event) -> list[Effect]:
        if event.id.seq != self.seen + 1:
            raise Violation(f"§11.1: the application saw event {event.id.seq} after {self.seen}")
        self.seen, self.link, self.hand = event.id.seq, event.id.link, None
        if event.event == "message":
            envelope = peek(event.data)
            if envelope.kind is Kind.RESPONSE and envelope.id in self.asked:
                self._replied(envelope.id)
        return self._put(Delivered())

    def _replied(self, id: Any) -> None:
        if id in self.replied:
            raise Violation(f"L7: request {id} was answered twice to the application")
        self.replied |= {id}

    def _on_ask(self) -> list[Effect]:
        """The application sends a request."""
        id = 100 * self.peers.who + 10 * self.process + len(self.asked) + 1
        self.asked += (id,)
        data = request(id)
        return self._put(Submit(data, peek(data)))

    def _on_move(self) -> list[Effect]:
        return self._put(Move())

    def _on_crash(self) -> list[Effect]:
        """The process dies; the next one goes on from the saved cursor (C4)."""
        self.process += 1
        self.machine = self.peers.machine(self.process, session="s", cursor=self.saved)
        self.seen, self.link, self.hand = self.saved.seq, self.saved.link, None
        self.asked, self.replied = (), frozenset()
        return self._put(Start())

    # After every step ---------------------------------------------------------------------------------

    def settle(self, effects: list[Effect]) -> None:
        """Hand events on, check what was said, and take time and path out of the state.

        Events are taken the moment the application is free, as the runtime does. Nothing is hidden by
        that: an event that lies untaken when its connection goes is one that lies behind another.
        """
        machine = self.machine
        while True:
            if self.hand is not None and machine.phase is Phase.OVER:
                effects += self._processed(self.hand)  # when makes no difference any more
            if self.hand is not None or (event := machine.take()) is None:
                break
            if machine.wanted(event):
                self.hand = event
            else:
                effects += self._processed(event)
        for effect in effects:
            match effect:
                case Settle():
                    self._replied(effect.id)
                case Get(_, cursor) | Negotiate(_, cursor) | Knock(_, cursor) | PostAck(cursor):
                    self._states(cursor)
                case Send(_, frame) if b"event: cursor-ack" in frame:
                    assert machine.cursor is not None
                    self._states(machine.cursor)
                case _:
                    pass
        if machine._faults:  # pyright: ignore[reportPrivateUsage]
            raise Violation(f"C7: the client met a discontinuity; {self.told[-1:]}")
        if machine.phase is Phase.OVER:
            self._check_end()
        self._normalise()

    def _states(self, cursor: EventId) -> None:
        """Whatever is stated has been processed, and is saved first (C4)."""
        if cursor.seq > self.seen:
            raise Violation(f"C4: the cursor {cursor.seq} is stated, {self.seen} is processed")
        self.saved = cursor

    def _check_end(self) -> None:
        error = self.machine.error
        code = "left" if error is None else str(error.code)
        if code not in self.peers.ends:
            raise Violation(f"§11.5: the client ended with {code}: {error}")
        self.peers.ended.add(code)
        if set(self.asked) != self.replied:
            raise Violation(f"L7: the client ended, requests {set(self.asked) - self.replied} wait")

    def _normalise(self) -> None:
        """Times become "some time": only which timers run matters. Numbers are used again.

        Of attempts only live ones matter, and their order; the world drops what belongs to older ones, as
        the machine does. How often the door failed decides only how long it is left alone.
        """
        machine = self.machine
        for timer in _TIMERS:
            _park(machine, timer, 1.0)
        for field in ("_heard", "_attached", "_door_wake", "_retry_floor"):
            setattr(machine, field, 0.0)
        machine._door_failures = min(machine._door_failures, 1)  # pyright: ignore[reportPrivateUsage]
        posted = machine.sending._posted_on  # pyright: ignore[reportPrivateUsage]
        if machine.outgoing.posting is None:
            machine.sending.attempt, posted = None, 0  # pyright: ignore[reportPrivateUsage]
            machine.sending._posts = machine.sending._posted_on = 0  # pyright: ignore[reportPrivateUsage]
        if machine.phase not in _AWAITING:
            machine.attempt = max(machine.stream or 0, machine.socket or 0, posted)


def _owner(machine: Client, timer: str) -> Any:
    return machine.sending if timer == "again" else machine


def _timer(machine: Client, timer: str) -> float | None:
    return getattr(_owner(machine, timer), _TIMERS[timer])


def _park(machine: Client, timer: str, at: float) -> None:
    """Set a timer that runs; one that does not is left alone."""
    if _timer(machine, timer) is not None:
        setattr(_owner(machine, timer), _TIMERS[timer], at)
