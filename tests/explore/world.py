"""A world: a server, a client, the network between them, and all that can happen next.

The network is made of exchanges (one HTTP request and its answer) and links (an event stream or a
socket, once the server serves it). A fault breaks a link, and each side finds out on its own, in its
own time or never; loses the answer of an exchange, whose request may still arrive, late; or
duplicates a request. Time is not a number here: a timer that runs may fire, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from gapless.protocol.client import Phase
from gapless.protocol.delivery import Medium
from gapless.protocol.moves import (
    CloseSocket,
    CloseStream,
    Delete,
    Get,
    Knock,
    Negotiate,
    Open,
    Over,
    Post,
    PostAck,
    Send,
    Settle,
)
from gapless.protocol.seam import SessionState
from gapless.protocol.session import View
from gapless.protocol.settings import Limits
from tests.explore.client import Peer, Peers
from tests.explore.parts import END, FIN, OPEN, Item, Violation, item
from tests.explore.server import NOTIFICATION, Server, Servers, result_of
from tests.explore.standard import Standards, Stream

__all__ = [
    "FAULTS",
    "UNSURE",
    "Action",
    "Exchange",
    "Link",
    "Scenario",
    "StreamUniverse",
    "Universe",
    "World",
]

Action = tuple[Any, ...]
"""A name, and what it is about: a request's, a connection's or a message's number."""

FAULTS: Final = frozenset(
    {"break", "lose", "delay", "duplicate", "eat", "late", "overdue", "crash", "restart"}
)
"""What nobody can count on not happening; a bounded number of times."""

UNSURE: Final = frozenset({"emit", "ask", "sibling", "end", "aged", "move", "gone", "lost", "ack", "stray"})
"""What may happen but need not: nothing may depend on it to come to rest (§11.5).

`gone` and `lost` are the server's and the client's transport noticing by themselves that a link is
broken: a half-open connection may stay unnoticed for good. `stray` is a request that nobody waits
for any more being handled.
"""

_PENDING: Final = SessionState.UPGRADE_ACCEPTED_PENDING

SENT, HELD, ANSWERED = "sent", "held", "answered"
"""An exchange's request is on its way; the server has it; its answer is on its way."""

SIBLING: Final = -99
"""The owner of what a sibling does: it takes whatever comes, and answers nothing."""
_OTHERS: Final = frozenset({0, SIBLING})

_NUMBERS: Final = {"get": 1, "knock": 11, "upgrade": 21, "post": 31, "ack": 41, "mcp": 51}
"""Where the numbers of connections and requests begin: by kind, so that fewer orders are told apart."""

_ONCE: Final = frozenset({"get", "upgrade", "knock"})
"""Requests of which a client has one under way: a newer one means that nobody waits for the older."""
_REPEATABLE: Final = frozenset({"post", "upgrade"})


class Exchange(NamedTuple):
    """A request and its answer. `owner` is the client's attempt; 0 if nobody waits for an answer."""

    rid: int
    owner: int
    kind: str
    args: tuple[Any, ...]
    stage: str = SENT
    response: tuple[Any, ...] = ()


class Link(NamedTuple):
    """A connection that the server serves or served. `owner` is 0 once the client is done with it."""

    conn: int
    owner: int
    socket: bool
    alive: bool
    serving: bool
    opened: bool
    process: str
    down: tuple[Item, ...]
    up: tuple[Any, ...]


class Left(NamedTuple):
    """What may still happen, of what may happen only so often."""

    emits: int
    asks: int
    faults: int
    siblings: tuple[str, ...]
    ends: int
    ages: int
    moves: int


class World:
    """One state of everything."""

    __slots__ = ("client", "exchanges", "left", "links", "number", "numbers", "server")

    def __init__(
        self,
        universe: Universe,
        server: Server,
        client: Peer,
        exchanges: tuple[Exchange, ...],
        links: tuple[Link, ...],
        left: Left,
        before: World | None = None,
    ) -> None:
        self.server = server
        self.client = client
        self.exchanges = exchanges
        self.links = links
        self.left = left
        # Each part has a number, so that a world's identity is one integer. What did not change keeps its.
        if before is None:
            self.numbers = (universe.number(exchanges), universe.number(links), universe.number(left))
        else:
            was = before.numbers
            self.numbers = (
                was[0] if exchanges is before.exchanges else universe.number(exchanges),
                was[1] if links is before.links else universe.number(links),
                was[2] if left is before.left else universe.number(left),
            )
        a, b, c = self.numbers
        self.number = (((server.number << 24 | client.number) << 24 | a) << 24 | b) << 24 | c


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is explored: who is there, what may happen and how often, and how it may end.

    Attributes:
        before: events that the log holds when the client comes.
        emits, asks: notifications of the backend and requests of the application, at most.
        faults: of `kinds`, at most.
        siblings: requests of a second, naive client with the same token; each once, at any time.
        ends: errors that the client may end with; none if it must get through.
        prompt: feeds write as soon as they can; otherwise later, too.
        slow: the log takes its time to answer reads.
        acks: the client's ack timer fires (it may always be late, so that it matters only to eviction).
    """

    name: str
    client: dict[str, Any] = field(default_factory=dict[str, Any])
    limits: Limits = field(default_factory=Limits)
    before: int = 0
    emits: int = 2
    asks: int = 0
    faults: int = 0
    kinds: frozenset[str] = frozenset({"break", "lose", "late", "overdue"})
    siblings: tuple[str, ...] = ()
    view: View = View.SESSION
    closes: int = 0
    ages: int = 0
    moves: int = 0
    ends: frozenset[str] = frozenset()
    prompt: bool = False
    slow: bool = False
    acks: bool = False


class Universe:
    """All worlds of one scenario: the first, what can happen in each, and what then is."""

    unsure = UNSURE

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        crashes = bool(scenario.kinds & {"crash", "restart"})
        self.servers = Servers(scenario.view, scenario.limits, crashes=crashes)
        self.peers = Peers(scenario.limits, scenario.ends, crashes=crashes, **scenario.client)
        self._numbers: dict[Any, int] = {}

    def number(self, part: Any) -> int:
        """The number of a part of a world."""
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = len(self._numbers)
        return found

    def first(self) -> World:
        """The world at the start: the session is open, its event stream asked for."""
        s = self.scenario
        server = self.servers.start()
        for _ in range(s.before):
            server, _ = server.step("emit", NOTIFICATION)
            server, _ = server.step("commit")
        client, effects = self.peers.start()
        left = Left(s.emits, s.asks, s.faults, s.siblings, s.closes, s.ages, s.moves)
        world = World(self, server, client, (), (), left)
        return _Step(self, world).performing(effects).done()

    @property
    def ends(self) -> set[str]:
        """How the client ended, in some world."""
        return self.peers.ended

    # What can happen --------------------------------------------------------------------------------

    def actions(self, world: World) -> list[Action]:
        """Everything that can happen next. Once the client is over, nothing is of interest."""
        server, client, exchanges = world.server, world.client, world.exchanges
        links, left = world.links, world.left
        if client.over:
            return []
        kinds = self.scenario.kinds if left.faults else ()
        out: list[Action] = []
        if left.emits:
            out.append(("emit",))
        if left.asks:
            out.append(("ask",))
        if server.commit is not None:
            out.append(("commit",))
        out += [("result", id) for id in server.answerable]
        out += [("sibling", what) for what in left.siblings]
        if left.ends:
            out.append(("end",))
        if left.ages:
            out.append(("aged",))
        if left.moves:
            out.append(("move",))
        for e in exchanges:
            if e.stage is SENT and (e.kind != "post" or server.ready(e.args[1])):
                out.append(("handle" if e.owner not in _OTHERS else "stray", e.rid))
            elif e.stage is ANSWERED:
                out.append(("respond", e.rid))
            if e.owner in _OTHERS:
                continue
            if "lose" in kinds:
                out.append(("lose", e.rid))
            if "delay" in kinds and e.stage is SENT:
                out.append(("delay", e.rid))
            if e.stage is SENT and e.kind in _REPEATABLE and "duplicate" in kinds:
                out.append(("duplicate", e.rid))
            if e.stage is SENT and e.kind == "knock" and "eat" in kinds:
                out.append(("eat", e.rid))
        for ask in server.asks:
            if ask.heard:
                out.append(("verdict", ask.rid))
            elif self._silent(links, ask.conn):
                out.append(("silence", ask.rid))
            elif "late" in kinds and any(link.conn == ask.conn for link in links):
                out.append(("late", ask.rid))
        for link in links:
            self._link_actions(world, link, kinds, out)
        if client.hand is not None:
            out.append(("accept",))
        for timer in client.timers:
            if timer != "ack":
                out.append(("tick", timer))
            elif self.scenario.acks:
                out.append(("ack",))
        out += [(kind,) for kind in ("crash", "restart") if kind in kinds]
        return out

    def _link_actions(
        self, world: World, link: Link, kinds: frozenset[str] | tuple[()], out: list[Action]
    ) -> None:
        server, client = world.server, world.client
        conn = link.conn
        if link.serving:
            delivery = server.delivery(conn)
            assert delivery is not None
            # What is written to a dead link goes nowhere, so only its end is of interest.
            if conn in server.due and (link.alive or delivery.close is not None):
                if not self.scenario.slow:
                    out.append(("feed", conn))
                elif any(c == conn for c, _ in server.reads):
                    out.append(("write", conn))
                else:
                    out.append(("poll", conn))
            if not link.alive:
                out.append(("gone", conn))
            elif link.up and (link.up[0] is FIN or server.ready(_numbers(link.up[0]))):
                out.append(("up", conn))
            if link.alive and delivery.gate is not None and "overdue" in kinds:
                out.append(("overdue", conn))
        if link.alive:
            if link.owner and link.down and not client.full and (link.socket or client.reading):
                out.append(("deliver", conn))
            if "break" in kinds and link.owner != SIBLING:
                out.append(("break", conn))
        elif link.owner and not link.opened:
            out.append(("unanswered", conn))
        elif link.owner and (link.socket or client.reading):
            out.append(("lost", conn))
            if client.listens and isinstance(client, Peer):
                out.append(("quiet", conn))

    def _silent(self, links: tuple[Link, ...], conn: int) -> bool:
        """Whether nobody is there to answer a probe: the link is broken, or its client gone."""
        # A binding that is still being committed has no link yet; soon it has.
        return any(link.conn == conn and (not link.alive or link.owner in _OTHERS) for link in links)

    # What then is -----------------------------------------------------------------------------------

    def apply(self, world: World, action: Action) -> World:
        """The world after an action; `check` says whether it may be.

        Raises:
            Violation: a machine did what it must not.
        """
        step = _Step(self, world)
        getattr(step, action[0])(*action[1:])
        return step.done()

    def explain(self, world: World, action: Action) -> list[str]:
        """What the machines say in this step."""
        step = _Step(self, world, telling=True)
        try:
            getattr(step, action[0])(*action[1:])
        except Exception as error:  # it is what the trace is about
            step.told.append(f"{type(error).__name__}: {error}")
        return step.told

    def describe(self, world: World) -> list[str]:
        """Where everything stands, for a trace."""
        lines = [f"  | {world.server}", f"  | {world.client}"]
        for e in world.exchanges:
            what = e.response if e.stage is ANSWERED else e.args
            lines.append(f"  | request {e.rid} of {e.owner or 'nobody'}: {e.kind} {what} ({e.stage})")
        for link in world.links:
            kind = "socket" if link.socket else "stream"
            state = ("" if link.alive else " broken") + ("" if link.serving else " closed by the server")
            lines.append(
                f"  | {kind} {link.conn} of {link.owner or 'nobody'}{state}: "
                f"down {list(link.down)}, up {list(link.up)}"
            )
        return lines

    def check(self, world: World) -> None:
        """What no single component can see: what the application saw, and whether all is quiet too early."""
        server, client = world.server, world.client
        if client.seen > len(server.history):
            raise Violation(
                f"L2: the application saw event {client.seen}, {len(server.history)} are committed"
            )
        if client.seen and client.link != server.history[client.seen - 1].link:
            raise Violation(f"§11.1: what the application saw is not what the log holds, at {client.seen}")
        for link in world.links:
            idle = link.alive and link.serving and link.opened and not link.down and not link.up
            if not idle or link.owner in _OTHERS or link.conn in server.due:
                continue
            delivery = server.delivery(link.conn)
            assert delivery is not None
            if delivery.gate is None and client.anchor != server.committed:
                raise Violation(
                    f"§11.2: connection {link.conn} is idle, the client was told of {client.anchor}, "
                    f"the log holds {server.committed}"
                )
            if client.quiet and client.seen != client.anchor:
                raise Violation(
                    f"§11.2: nothing is in flight, {client.anchor} arrived, {client.seen} was seen"
                )
            if delivery.gate is not None and client.quiet and client.phase in (Phase.BRIDGING, Phase.BOUND):
                raise Violation(
                    f"§11.5: the server waits for an ack of {delivery.gate}, the client for events"
                )

    def rests(self, world: World) -> bool:
        """Whether this is where things may stop: an explicit end, or caught up and all requests settled."""
        server, client, exchanges, links = world.server, world.client, world.exchanges, world.links
        if client.over:
            return True
        if client.phase not in (Phase.STREAMING, Phase.BOUND) or not client.quiet or not client.settled:
            return False
        if server.commit is not None or server.session.inbox.open:
            return False
        if client.seen != server.session.outbox.head or any(e.owner not in _OTHERS for e in exchanges):
            return False
        return any(
            link.owner not in _OTHERS
            and link.alive
            and link.serving
            and not link.down
            and not link.up
            and link.conn not in server.due
            for link in links
        )


class StreamUniverse(Universe):
    """The worlds of the stream view: the same server and network, and a standard client (§7)."""

    # That it finds out is its own affair: this protocol asks nothing of it.
    unsure = UNSURE - {"lost"}

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.servers = Servers(View.STREAM, scenario.limits, crashes=False)
        self.peers: Any = Standards()
        self._numbers: dict[Any, int] = {}

    def check(self, world: World) -> None:
        server, client = world.server, cast("Any", world.client)
        for stream in client.streams:
            self._check_stream(server, stream)
        for link in world.links:
            idle = link.alive and link.serving and link.opened and link.owner not in _OTHERS and not link.down
            delivery = server.delivery(link.conn)
            if not idle or delivery is None or link.conn in server.due:
                continue
            stream = client.streams[link.owner - 1]
            missing = [
                seq
                for seq, told in enumerate(server.history, 1)
                if told.stream == delivery.stream and seq > max(stream.first or 0, *stream.seen, 0)
            ]
            if missing:
                raise Violation(f"§11.2: stream {delivery.stream} is idle, events {missing} were never sent")

    def _check_stream(self, server: Server, stream: Stream) -> None:
        """What came on a stream is that stream's events, in order and without a hole (M2)."""
        if not stream.seen or stream.first is None:
            return
        number = server.history[stream.seen[0] - 1].stream
        events = [
            seq
            for seq, told in enumerate(server.history, 1)
            if told.stream == number and stream.first < seq <= stream.seen[-1]
        ]
        if events != list(stream.seen):
            raise Violation(f"M2: of stream {number} came {stream.seen}, the log holds {events}")

    def rests(self, world: World) -> bool:
        server, client = world.server, cast("Any", world.client)
        if server.commit is not None or any(e.owner not in _OTHERS for e in world.exchanges):
            return False
        for at, stream in enumerate(client.streams, 1):
            if stream.state in ("done", "lost"):
                continue
            link = next((link for link in world.links if link.owner == at), None)
            if stream.state != "open" or stream.request or link is None:
                return False
            if not link.alive or not link.serving or link.down or link.conn in server.due:
                return False
        return True


class _Step:
    """One action being carried out."""

    def __init__(self, universe: Universe, world: World, *, telling: bool = False) -> None:
        self._universe = universe
        self._before = world
        self._requests: dict[int, Exchange] | None = None
        self._connections: dict[int, Link] | None = None
        self._server, self._client = world.server, world.client
        self._left = world.left
        self._may_fence = False
        self._telling = telling
        self.told: list[str] = []

    # Most steps touch one of the two, or none.
    @property
    def _exchanges(self) -> dict[int, Exchange]:
        found = self._requests
        if found is None:
            found = self._requests = {e.rid: e for e in self._before.exchanges}
        return found

    @property
    def _links(self) -> dict[int, Link]:
        found = self._connections
        if found is None:
            found = self._connections = {link.conn: link for link in self._before.links}
        return found

    def done(self) -> World:
        """The world after it."""
        if self._universe.scenario.prompt:
            self._feed_all()
        if self._client.renumber:
            self._renumber()
        links, exchanges = self._before.links, self._before.exchanges
        if self._connections is not None:
            items = sorted(self._connections.items())
            links = tuple([link for _, link in items if link.owner or link.serving])
        if self._requests is not None:
            exchanges = tuple([e for _, e in sorted(self._requests.items())])
        return World(self._universe, self._server, self._client, exchanges, links, self._left, self._before)

    def _feed_all(self) -> None:
        """Feeds that write as soon as they can."""
        while self._server.due:
            links = self._links
            for conn in self._server.due:
                if links[conn].alive:
                    self.feed(conn)
                    break
            else:
                return

    def _renumber(self) -> None:
        """Attempts get the lowest numbers, so that how many there were does not make a difference."""
        numbers = dict(self._client.renumber)
        for conn, link in self._links.items():
            if link.owner > 0:
                self._links[conn] = link._replace(owner=numbers.get(link.owner, 0))
        for rid, e in self._exchanges.items():
            if e.owner > 0:
                self._exchanges[rid] = e._replace(owner=numbers.get(e.owner, 0))
        self._client, _ = self._client.step("renumber")

    # Environment --------------------------------------------------------------------------------------

    def emit(self) -> None:
        self._left = self._left._replace(emits=self._left.emits - 1)
        self._serve("emit", NOTIFICATION)

    def result(self, id: int) -> None:
        self._serve("emit", result_of(id))

    def ask(self) -> None:
        self._left = self._left._replace(asks=self._left.asks - 1)
        self._act("ask")

    def move(self) -> None:
        """The application asks for the WebSocket, whatever the policy says."""
        self._left = self._left._replace(moves=self._left.moves - 1)
        self._act("move")

    def end(self) -> None:
        self._left = self._left._replace(ends=self._left.ends - 1)
        self._serve("end")

    def aged(self) -> None:
        self._left = self._left._replace(ages=self._left.ages - 1)
        self._serve("aged")

    def sibling(self, what: str) -> None:
        siblings = tuple(s for s in self._left.siblings if s != what)
        self._left = self._left._replace(siblings=siblings)
        here = str(self._server.id_at(self._server.committed))
        kind, args = SIBLINGS[what](here, self._server)
        self._new(SIBLING, kind, args)

    # The server's side --------------------------------------------------------------------------------

    def commit(self) -> None:
        self._serve("commit")

    def handle(self, rid: int) -> None:
        e = self._exchanges[rid]
        self._exchanges[rid] = e._replace(stage=HELD)
        taken = {*self._links, *self._server.numbers}
        first = _NUMBERS[e.kind]
        conn = next(n for n in range(first, first + 9) if n not in taken)
        before = self._server.session.door.state
        self._serve("request", rid, conn, e.kind, *e.args)
        burned = before is _PENDING and self._server.session.door.state is SessionState.TERMINATED
        # A process that died at the door does not know, and may resume there (B1).
        if burned and e.owner not in _OTHERS and (e.kind == "upgrade" or self._client.process == 1):
            raise Violation("U9: the client itself burned the session, at the door it should go through")

    stray = handle

    def verdict(self, rid: int) -> None:
        self._serve("verdict", rid, True)

    def silence(self, rid: int) -> None:
        self._may_fence = True
        self._serve("verdict", rid, False)

    def late(self, rid: int) -> None:
        """The peer lives and will answer, but not within the probe's second."""
        self._fault()
        self.silence(rid)

    def feed(self, conn: int) -> None:
        self._serve("feed", conn)

    def poll(self, conn: int) -> None:
        self._serve("poll", conn)

    def write(self, conn: int) -> None:
        self._serve("write", conn)

    def overdue(self, conn: int) -> None:
        self._fault()
        self._serve("overdue", conn)

    def up(self, conn: int) -> None:
        """What the client sent on a connection arrives."""
        link = self._links[conn]
        if link.up[0] is FIN:
            self.gone(conn)
            return
        self._links[conn] = link._replace(up=link.up[1:])
        self._serve("frame", conn, link.process, link.up[0])

    def gone(self, conn: int) -> None:
        """The server notices that a connection is gone."""
        self._links[conn] = self._links[conn]._replace(serving=False, up=())
        self._serve("gone", conn)

    def restart(self) -> None:
        """The server's process dies, with all its connections."""
        self._fault()
        self._serve("crash")
        for conn, link in self._links.items():
            self._links[conn] = link._replace(alive=False, serving=False, down=(), up=())
        for e in list(self._exchanges.values()):
            if e.stage is HELD:
                self._unanswered(e)

    # The client's side --------------------------------------------------------------------------------

    def respond(self, rid: int) -> None:
        e = self._exchanges.pop(rid)
        self._act("answered", e.owner, e.response)

    def deliver(self, conn: int) -> None:
        """The next event arrives, with the control blocks before it.

        Those are taken in one go: what they say is either fixed when the connection opens, or a fact that
        only grows; and whatever could come between them can as well come before or after.
        """
        while True:
            link = self._links[conn]
            first = link.down[0]
            self._links[conn] = link = link._replace(down=link.down[1:])
            if first.kind is OPEN:
                self._links[conn] = link._replace(opened=True)
                self._act("open", link.owner, link.socket, first.value)
            elif first.kind is END:
                self._links[conn] = link._replace(owner=0)
                self._act("closed", link.owner, link.socket, first.value)
            else:
                self._act("block", link.owner, first)
            link = self._links[conn]
            block = first.block
            if block is not None and block.id is not None and block.data:
                return
            ready = link.owner and link.down and (link.socket or self._client.reading)
            if not ready or link.down[0].kind is END:
                return

    def unanswered(self, conn: int) -> None:
        link = self._links[conn]
        self._links[conn] = link._replace(owner=0)
        self._act("failed", link.owner)

    def lost(self, conn: int) -> None:
        """The client notices that a connection is gone."""
        link = self._links[conn]
        self._links[conn] = link._replace(owner=0)
        self._act("closed", link.owner, link.socket, 1006)

    def quiet(self, _: int) -> None:
        self._act("quiet")

    def accept(self) -> None:
        self._act("accept")

    def tick(self, timer: Any) -> None:
        self._act("tick", timer)

    def ack(self) -> None:
        self._act("tick", "ack")

    def crash(self) -> None:
        """The client's process dies. Its connections are reset, which the server may not hear of."""
        self._fault()
        for conn, link in list(self._links.items()):
            self._links[conn] = link._replace(owner=0, alive=False, down=(), up=())
            self._died(conn)
        for e in list(self._exchanges.values()):
            self._orphan(e)
        self._act("crash")

    # Faults -------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        self._left = self._left._replace(faults=self._left.faults - 1)

    def lose(self, rid: int) -> None:
        """No answer comes: the request is lost, or its answer."""
        self._fault()
        e = self._exchanges[rid]
        self._unanswered(e)
        if e.stage is SENT:
            del self._exchanges[rid]

    def delay(self, rid: int) -> None:
        """No answer comes in time: the request is still on its way, and will be handled."""
        self._fault()
        self._unanswered(self._exchanges[rid])

    def _unanswered(self, e: Exchange) -> None:
        self._orphan(e)
        if e.owner not in _OTHERS:
            self._act("failed", e.owner)

    def eat(self, rid: int) -> None:
        """A proxy that knows no upgrades answers a handshake by itself (U6)."""
        self._fault()
        self._act("eaten", self._exchanges.pop(rid).owner)

    def duplicate(self, rid: int) -> None:
        """The network delivers a request twice; nobody hears of the second answer."""
        self._fault()
        e = self._exchanges[rid]
        self._new(0, e.kind, e.args)

    def _orphan(self, e: Exchange) -> None:
        if e.owner == SIBLING:
            return
        if e.stage is ANSWERED:
            del self._exchanges[e.rid]
        else:
            self._exchanges[e.rid] = e._replace(owner=0)

    # `break` is a keyword.
    def _break(self, conn: int) -> None:
        """A link breaks, and what is on it is lost. Each side notices on its own, or never."""
        self._fault()
        self._links[conn] = self._links[conn]._replace(alive=False, down=(), up=())
        self._died(conn)

    def _died(self, conn: int) -> None:
        """Nobody reads what the server writes to this link.

        Where the server's delivery stood then is of no interest: it writes to nobody. Of an event stream
        (session view) not even that it is there: no decision asks for it, so that the server may as well
        notice at once.
        """
        link = self._links[conn]
        if not link.owner:
            self._links[conn] = link = link._replace(opened=True, process="")
        if not link.serving:
            return
        if link.socket or self._universe.scenario.view is View.STREAM:
            self._serve("died", conn)
        else:
            self.gone(conn)

    # Components ---------------------------------------------------------------------------------------

    def _serve(self, *act: Any) -> None:
        if self._telling:
            self.told += [f"  server: {line}" for line in self._server.explain(*act)]
        self._server, out = self._server.step(*act)
        for kind, *args in out:
            getattr(self, "_out_" + kind)(*args)

    def _act(self, *act: Any) -> None:
        if self._telling:
            self.told += [f"  client: {line}" for line in self._client.explain(*act)]
        self._client, effects = self._client.step(*act)
        self.performing(effects)

    def _out_answer(self, rid: int, response: tuple[Any, ...]) -> None:
        e = self._exchanges[rid]
        if e.owner not in _OTHERS:
            self._exchanges[rid] = e._replace(stage=ANSWERED, response=response)
        else:
            del self._exchanges[rid]

    def _out_more(self, rid: int, rest: tuple[Any, ...]) -> None:
        e = self._exchanges[rid]
        self._exchanges[rid] = e._replace(stage=SENT, args=(e.args[0], rest))

    def _out_open(self, rid: int, conn: int, medium: Medium, echo: int) -> None:
        e = self._exchanges.pop(rid)
        down = (item(OPEN, echo),) if e.owner not in _OTHERS else ()
        socket = medium is Medium.SOCKET
        process = self._process() if socket else ""
        self._links[conn] = Link(conn, e.owner, socket, bool(e.owner), True, not down, process, down, ())
        if not e.owner:
            self._died(conn)

    def _out_write(self, conn: int, items: tuple[Item, ...]) -> None:
        link = self._links[conn]
        if link.alive and link.owner not in _OTHERS:
            self._links[conn] = link._replace(down=link.down + items)

    def _out_close(self, conn: int, code: int) -> None:
        link = self._links[conn]
        down = (*link.down, item(END, code)) if link.alive and link.owner not in _OTHERS else ()
        owner = 0 if link.owner == SIBLING else link.owner
        self._links[conn] = link._replace(owner=owner, serving=False, down=down, up=())

    def _out_fenced(self, conn: int) -> None:
        link = self._links.get(conn)
        if link is not None and link.alive and link.owner not in _OTHERS and not self._may_fence:
            raise Violation(f"B6: connection {conn} lives and answers, and was fenced")

    def _process(self) -> str:
        return f"c{self._client.process}"

    def _new(self, owner: int, kind: str, args: tuple[Any, ...]) -> None:
        first = _NUMBERS[kind]
        rid = next(n for n in range(first, first + 9) if n not in self._exchanges)
        self._exchanges[rid] = Exchange(rid, owner, kind, args)

    def performing(self, effects: tuple[Any, ...]) -> _Step:
        """Carry out what the client wants done."""
        for effect in effects:
            match effect:
                case Get(attempt, cursor):
                    self._ask_once(attempt, "get", (str(cursor),))
                case Negotiate(attempt, cursor, nonce):
                    self._ask_once(attempt, "upgrade", (str(cursor), nonce))
                case Knock(attempt, cursor, ticket):
                    self._ask_once(attempt, "knock", (str(cursor), ticket))
                case Post(attempt, messages):
                    for e in list(self._exchanges.values()):
                        if SIBLING < e.owner < 0:
                            self._orphan(e)  # it hangs: the client waits for it no more
                    numbered = tuple((kept.number, kept.data) for kept in messages)
                    self._new(attempt, "post", (self._process(), numbered))
                case PostAck(cursor):
                    self._new(0, "ack", (str(cursor),))
                case Send(attempt, frame):
                    self._send(attempt, frame)
                case CloseStream(attempt) | CloseSocket(attempt):
                    self._close(attempt)
                case ("get", attempt, cursor):  # a standard client's
                    self._new(attempt, "get", (cursor,))
                case ("mcp", attempt, data):
                    self._new(attempt, "mcp", (data,))
                case Open() | Delete() | Settle() | Over():
                    pass
        return self

    def _ask_once(self, attempt: int, kind: str, args: tuple[Any, ...]) -> None:
        for e in list(self._exchanges.values()):
            if e.owner not in _OTHERS and e.kind in _ONCE:
                self._orphan(e)
        self._new(attempt, kind, args)

    def _send(self, attempt: int, frame: bytes) -> None:
        for conn, link in self._links.items():
            if link.owner == attempt and link.alive and link.serving:
                self._links[conn] = link._replace(up=(*link.up, frame))

    def _close(self, attempt: int) -> None:
        for conn, link in list(self._links.items()):
            if link.owner == attempt:
                up = (*link.up, FIN) if link.alive and link.serving else ()
                self._links[conn] = link._replace(owner=0, down=(), up=up)
                self._died(conn)


setattr(_Step, "break", _Step._break)


def _numbers(frame: bytes) -> tuple[tuple[int, bytes], ...]:
    """The numbers of the messages in a frame."""
    return tuple((int(line[4:]), b"") for line in frame.split(b"\n") if line.startswith(b"id: "))


def _forge(here: str) -> str:
    seq, stream, _ = here.split(".")
    return f"{seq}.{stream}.{'0' * 16}"


SIBLINGS: Final[dict[str, Callable[[str, Server], tuple[str, tuple[Any, ...]]]]] = {
    "resume": lambda here, _: ("get", (here,)),
    "resume without a cursor": lambda here, _: ("get", (None,)),
    "resume from the start": lambda here, _: ("get", ("0",)),
    "resume at a server position": lambda here, _: ("get", (here.split(".")[0],)),
    "resume at a forged cursor": lambda here, _: ("get", (_forge(here),)),
    "negotiate": lambda here, _: ("upgrade", (here, "sibling")),
    "negotiate from the start": lambda here, _: ("upgrade", ("0", "sibling")),
    "handshake": lambda here, _: ("knock", (here, None)),
}
"""What a second client of the same token may do, knowing the last event that the log holds."""
