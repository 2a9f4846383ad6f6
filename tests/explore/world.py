"""A world: a server, its clients, the network between them, and all that can happen next.

The network is made of exchanges (one HTTP request and its answer) and links (an event stream or a
socket, once the server serves it). A fault breaks a link, and each side finds out on its own, in its
own time or never; loses the answer of an exchange, whose request may still arrive, late; or
duplicates a request. Time is not a number here: a timer that runs may fire, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, cast

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
from tests.explore.client import NAMES, Peer, Peers
from tests.explore.parts import END, FIN, OPEN, Item, Violation, item
from tests.explore.server import AGED, LAPSED, NOTIFICATION, Server, Servers, result_of
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
    {"break", "lose", "delay", "duplicate", "eat", "late", "overdue", "crash", "restart", "backend"}
)
"""What nobody can count on not happening; a bounded number of times."""

UNSURE: Final = frozenset(
    {"emit", "ask", "sibling", "end", "aged", "lapsed", "move", "gone", "lost", "ack", "stray", "unheard"}
)
"""What may happen but need not: nothing may depend on it to come to rest (§11.5).

`gone` and `lost` are the server's and the client's transport noticing by themselves that a link is
broken: a half-open connection may stay unnoticed for good. `stray` is a request that nobody waits
for any more being handled, `unheard` one that comes while no server runs.
"""

_PENDING: Final = SessionState.UPGRADE_ACCEPTED_PENDING

SENT, HELD, ANSWERED = "sent", "held", "answered"
"""An exchange's request is on its way; the server has it; its answer is on its way."""

SIBLING: Final = -99
"""The owner of what a sibling does: it takes whatever comes, and answers nothing."""
_OTHERS: Final = frozenset({0, SIBLING})

_NUMBERS: Final = {"get": 1, "knock": 11, "upgrade": 21, "post": 31, "ack": 41, "mcp": 51, "delete": 61}
"""Where the numbers of connections and requests begin: by kind, so that fewer orders are told apart."""

_ONCE: Final = frozenset({"get", "upgrade", "knock"})
"""Requests of which a client has one under way: a newer one means that nobody waits for the older."""
_REPEATABLE: Final = frozenset({"post", "upgrade"})


class Exchange(NamedTuple):
    """A request of client `who`, and its answer. `owner` is the attempt; 0 if nobody waits for an answer."""

    rid: int
    who: int
    owner: int
    kind: str
    args: tuple[Any, ...]
    stage: str = SENT
    response: tuple[Any, ...] = ()


class Link(NamedTuple):
    """A connection that the server serves or served. `owner` is 0 once client `who` is done with it."""

    conn: int
    who: int
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
    asks: tuple[int, ...]
    faults: int
    siblings: tuple[str, ...]
    ends: int
    ages: int
    lapses: int
    moves: int


class World:
    """One state of everything."""

    __slots__ = ("clients", "exchanges", "left", "links", "number", "numbers", "server")

    def __init__(
        self,
        universe: Universe,
        server: Server,
        clients: tuple[Peer, ...],
        exchanges: tuple[Exchange, ...],
        links: tuple[Link, ...],
        left: Left,
        before: World | None = None,
    ) -> None:
        self.server = server
        self.clients = clients
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
        number = ((server.number << 24 | a) << 24 | b) << 24 | c
        for client in clients:
            number = number << 24 | client.number
        self.number = number


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is explored: who is there, what may happen and how often, and how it may end.

    Attributes:
        client: options of the client; `second` those of another one with the same token, if there is one.
        before: events that the log holds when the client comes.
        emits, asks: notifications of the backend and requests of each application, at most.
        moves: times that the first application asks for the WebSocket, at most.
        faults: of `kinds`, at most.
        siblings: requests of a second, naive client with the same token; each once, at any time.
        ends: errors that a client may end with; none if it must get through.
        prompt: feeds write as soon as they can; otherwise later, too.
        slow: the log takes its time to answer reads.
        ages, lapses: times that everything becomes too old, and that pins lapse as well; at most.
        acks: the client's ack timer fires (it may always be late, so that it matters only to eviction).
    """

    name: str
    client: dict[str, Any] = field(default_factory=dict[str, Any])
    second: dict[str, Any] | None = None
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
    lapses: int = 0
    moves: int = 0
    on_backend_loss: Literal["restart", "supersede"] = "supersede"
    ends: frozenset[str] = frozenset()
    prompt: bool = False
    slow: bool = False
    acks: bool = False


class Universe:
    """All worlds of one scenario: the first, what can happen in each, and what then is."""

    unsure = UNSURE

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        limits = replace(scenario.limits, on_backend_loss=scenario.on_backend_loss)
        self.servers = Servers(scenario.view, limits, crashes="restart" in scenario.kinds)
        clients = [scenario.client] if scenario.second is None else [scenario.client, scenario.second]
        self.peers = tuple(
            Peers(who, scenario.limits, scenario.ends, crashes="crash" in scenario.kinds, **options)
            for who, options in enumerate(clients)
        )
        self._numbers: dict[Any, int] = {}

    def number(self, part: Any) -> int:
        """The number of a part of a world."""
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = len(self._numbers)
        return found

    def first(self) -> World:
        """The world at the start: the session is open, its event stream asked for by whoever is there."""
        s = self.scenario
        server = self.servers.start()
        for _ in range(s.before):
            server, _ = server.step("emit", NOTIFICATION)
            server, _ = server.step("commit")
        started = [peers.start() for peers in self.peers]
        left = Left(
            s.emits, (s.asks,) * len(started), s.faults, s.siblings, s.closes, s.ages, s.lapses, s.moves
        )
        step = _Step(self, World(self, server, tuple(client for client, _ in started), (), (), left))
        for who, (_, effects) in enumerate(started):
            step.performing(who, effects)
        return step.done()

    @property
    def ends(self) -> set[str]:
        """How the clients ended, in some world."""
        return set[str]().union(*(peers.ended for peers in self.peers))

    # What can happen --------------------------------------------------------------------------------

    def actions(self, world: World) -> list[Action]:
        """Everything that can happen next. Once all clients are over, nothing is of interest."""
        server, exchanges, links, left = world.server, world.exchanges, world.links, world.left
        live = [(who, client) for who, client in enumerate(world.clients) if not client.over]
        if not live:
            return []
        kinds = self.scenario.kinds if left.faults else ()
        out: list[Action] = []
        if not server.up:
            out.append(("boot",))
        elif left.emits:
            out.append(("emit",))
        out += [("ask", who) for who, _ in live if left.asks[who]]
        if server.commit is not None:
            out.append(("commit",))
        out += [("result", id) for id in server.answerable]
        out += [("sibling", what) for what in left.siblings]
        if left.ends and server.up:
            out.append(("end",))
        if left.ages and server.up:
            out.append(("aged",))
        if left.lapses and server.up:
            out.append(("lapsed",))
        if left.moves and not world.clients[0].over:
            out.append(("move",))
        for e in exchanges:
            if e.stage is SENT and not server.up:
                out.append(("unheard", e.rid))
            elif e.stage is SENT and (e.kind != "post" or server.ready(e.args[1])):
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
        for who, client in live:
            if client.hand is not None:
                out.append(("accept", who))
            for timer in client.timers:
                if timer != "ack":
                    out.append(("tick", who, timer))
                elif self.scenario.acks:
                    out.append(("ack", who))
            if "crash" in kinds:
                out.append(("crash", who))
        if "restart" in kinds and server.up:
            out.append(("restart", False))
            if server.commit is not None:
                out.append(("restart", True))
        if "backend" in kinds and server.has and server.session.reason is None:
            out.append(("backend",))
        return out

    def _link_actions(
        self, world: World, link: Link, kinds: frozenset[str] | tuple[()], out: list[Action]
    ) -> None:
        server, client = world.server, world.clients[link.who]
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
        lines = [f"  | {world.server}", *(f"  | {client}" for client in world.clients)]
        for e in world.exchanges:
            what = e.response if e.stage is ANSWERED else e.args
            lines.append(f"  | request {e.rid} of {_whose(e)}: {e.kind} {what} ({e.stage})")
        for link in world.links:
            kind = "socket" if link.socket else "stream"
            state = ("" if link.alive else " broken") + ("" if link.serving else " closed by the server")
            lines.append(
                f"  | {kind} {link.conn} of {_whose(link)}{state}: down {list(link.down)}, up {list(link.up)}"
            )
        return lines

    def check(self, world: World) -> None:
        """What no single component can see: what the application saw, and whether all is quiet too early."""
        server = world.server
        for client in world.clients:
            if client.seen > len(server.history):
                raise Violation(
                    f"L2: the application saw event {client.seen}, {len(server.history)} are committed"
                )
            if client.seen and client.link != server.history[client.seen - 1].link:
                raise Violation(
                    f"§11.1: what the application saw is not what the log holds, at {client.seen}"
                )
        for link in world.links:
            idle = link.alive and link.serving and link.opened and not link.down and not link.up
            if not idle or link.owner in _OTHERS or link.conn in server.due:
                continue
            client, delivery = world.clients[link.who], server.delivery(link.conn)
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
        server = world.server
        live = [(who, client) for who, client in enumerate(world.clients) if not client.over]
        if not live:
            return True
        if server.commit is not None or server.session.inbox.open:
            return False
        if any(e.owner not in _OTHERS for e in world.exchanges):
            return False
        return all(self._rests(world, who, client) for who, client in live)

    def _rests(self, world: World, who: int, client: Peer) -> bool:
        """Whether a client is caught up, and listens."""
        if client.phase not in (Phase.STREAMING, Phase.BOUND) or not client.quiet or not client.settled:
            return False
        server = world.server
        return client.seen == server.session.outbox.head and any(
            link.who == who
            and link.owner not in _OTHERS
            and link.alive
            and link.serving
            and not link.down
            and not link.up
            and link.conn not in server.due
            for link in world.links
        )


class StreamUniverse(Universe):
    """The worlds of the stream view: the same server and network, and a standard client (§7)."""

    # That it finds out is its own affair: this protocol asks nothing of it.
    unsure = UNSURE - {"lost"}

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.servers = Servers(View.STREAM, scenario.limits, crashes=False)
        self.peers: Any = (Standards(),)
        self._numbers: dict[Any, int] = {}

    def check(self, world: World) -> None:
        server, client = world.server, cast("Any", world.clients[0])
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
        server, client = world.server, cast("Any", world.clients[0])
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
        self._server, self._clients = world.server, list(world.clients)
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
        for who, client in enumerate(self._clients):
            if client.renumber:
                self._renumber(who, client)
        links, exchanges = self._before.links, self._before.exchanges
        if self._connections is not None:
            items = sorted(self._connections.items())
            links = tuple([link for _, link in items if link.owner or link.serving])
        if self._requests is not None:
            exchanges = tuple([e for _, e in sorted(self._requests.items())])
        clients = tuple(self._clients)
        return World(self._universe, self._server, clients, exchanges, links, self._left, self._before)

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

    def _renumber(self, who: int, client: Peer) -> None:
        """Attempts get the lowest numbers, so that how many there were does not make a difference."""
        numbers = dict(client.renumber)
        for conn, link in self._links.items():
            if link.who == who and link.owner > 0:
                self._links[conn] = link._replace(owner=numbers.get(link.owner, 0))
        for rid, e in self._exchanges.items():
            if e.who == who and e.owner > 0:
                self._exchanges[rid] = e._replace(owner=numbers.get(e.owner, 0))
        self._clients[who], _ = client.step("renumber")

    # Environment --------------------------------------------------------------------------------------

    def emit(self) -> None:
        self._left = self._left._replace(emits=self._left.emits - 1)
        self._serve("emit", NOTIFICATION)

    def result(self, id: int) -> None:
        self._serve("emit", result_of(id))

    def ask(self, who: int) -> None:
        asks = tuple(n - (at == who) for at, n in enumerate(self._left.asks))
        self._left = self._left._replace(asks=asks)
        self._act(who, "ask")

    def move(self) -> None:
        """The application asks for the WebSocket, whatever the policy says."""
        self._left = self._left._replace(moves=self._left.moves - 1)
        self._act(0, "move")

    def end(self) -> None:
        self._left = self._left._replace(ends=self._left.ends - 1)
        self._serve("end")

    def aged(self) -> None:
        self._left = self._left._replace(ages=self._left.ages - 1)
        self._serve("aged", AGED)

    def lapsed(self) -> None:
        self._left = self._left._replace(lapses=self._left.lapses - 1)
        self._serve("aged", LAPSED)

    def sibling(self, what: str) -> None:
        siblings = tuple(s for s in self._left.siblings if s != what)
        self._left = self._left._replace(siblings=siblings)
        here = str(self._server.id_at(self._server.committed))
        kind, args = SIBLINGS[what](here, self._server)
        self._new(0, SIBLING, kind, args)

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
        if burned and e.owner not in _OTHERS and (e.kind == "upgrade" or self._clients[e.who].process == 1):
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

    def restart(self, landed: bool) -> None:
        """The server's process dies, with all its connections; another one will be there (`boot`)."""
        self._fault()
        self._serve("crash", landed)
        for conn, link in self._links.items():
            self._links[conn] = link._replace(alive=False, serving=False, down=(), up=())
        for rid, e in list(self._exchanges.items()):
            if e.stage is HELD and e.owner in _OTHERS:
                del self._exchanges[rid]
            elif e.stage is HELD:
                self._exchanges[rid] = e._replace(stage=ANSWERED, response=("reset",))

    def boot(self) -> None:
        self._serve("boot")

    def backend(self) -> None:
        """The MCP server dies; its owner does not."""
        self._fault()
        self._serve("lost")

    def unheard(self, rid: int) -> None:
        """A request finds no server: its connection is refused."""
        e = self._exchanges.pop(rid)
        if e.owner not in _OTHERS:
            self._act(e.who, "failed", e.owner)

    # The client's side --------------------------------------------------------------------------------

    def respond(self, rid: int) -> None:
        e = self._exchanges.pop(rid)
        self._act(e.who, "answered", e.owner, e.response)

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
                self._act(link.who, "open", link.owner, link.socket, first.value)
            elif first.kind is END:
                self._links[conn] = link._replace(owner=0)
                self._act(link.who, "closed", link.owner, link.socket, first.value)
            else:
                self._act(link.who, "block", link.owner, first)
            link = self._links[conn]
            block = first.block
            if block is not None and block.id is not None and block.data:
                return
            ready = link.owner and link.down and (link.socket or self._clients[link.who].reading)
            if not ready or link.down[0].kind is END:
                return

    def unanswered(self, conn: int) -> None:
        link = self._links[conn]
        self._links[conn] = link._replace(owner=0)
        self._act(link.who, "failed", link.owner)

    def lost(self, conn: int) -> None:
        """The client notices that a connection is gone."""
        link = self._links[conn]
        self._links[conn] = link._replace(owner=0)
        self._act(link.who, "closed", link.owner, link.socket, 1006)

    def quiet(self, conn: int) -> None:
        self._act(self._links[conn].who, "quiet")

    def accept(self, who: int) -> None:
        self._act(who, "accept")

    def tick(self, who: int, timer: Any) -> None:
        self._act(who, "tick", timer)

    def ack(self, who: int) -> None:
        self._act(who, "tick", "ack")

    def crash(self, who: int) -> None:
        """A client's process dies. Its connections are reset, which the server may not hear of."""
        self._fault()
        for conn, link in list(self._links.items()):
            if link.who == who:
                self._links[conn] = link._replace(owner=0, alive=False, down=(), up=())
                self._died(conn)
        for e in list(self._exchanges.values()):
            if e.who == who:
                self._orphan(e)
        self._act(who, "crash")

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
            self._act(e.who, "failed", e.owner)

    def eat(self, rid: int) -> None:
        """A proxy that knows no upgrades answers a handshake by itself (U6)."""
        self._fault()
        e = self._exchanges.pop(rid)
        self._act(e.who, "eaten", e.owner)

    def duplicate(self, rid: int) -> None:
        """The network delivers a request twice; nobody hears of the second answer."""
        self._fault()
        e = self._exchanges[rid]
        self._new(e.who, 0, e.kind, e.args)

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

    def _act(self, who: int, *act: Any) -> None:
        client = self._clients[who]
        if self._telling:
            self.told += [f"  {client.name}: {line}" for line in client.explain(*act)]
        self._clients[who], effects = client.step(*act)
        self.performing(who, effects)

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
        process = self._process(e.who) if socket else ""
        self._links[conn] = Link(
            conn, e.who, e.owner, socket, bool(e.owner), True, not down, process, down, ()
        )
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

    def _process(self, who: int) -> str:
        client = self._clients[who]
        return f"{client.name}-{client.process}"

    def _new(self, who: int, owner: int, kind: str, args: tuple[Any, ...]) -> None:
        first = _NUMBERS[kind]
        rid = next(n for n in range(first, first + 9) if n not in self._exchanges)
        self._exchanges[rid] = Exchange(rid, who, owner, kind, args)

    def performing(self, who: int, effects: tuple[Any, ...]) -> None:
        """Carry out what a client wants done."""
        for effect in effects:
            match effect:
                case Get(attempt, cursor):
                    self._ask_once(who, attempt, "get", (str(cursor),))
                case Negotiate(attempt, cursor, nonce):
                    self._ask_once(who, attempt, "upgrade", (str(cursor), nonce))
                case Knock(attempt, cursor, ticket):
                    self._ask_once(who, attempt, "knock", (str(cursor), ticket))
                case Post(attempt, messages):
                    for e in list(self._exchanges.values()):
                        if e.who == who and SIBLING < e.owner < 0:
                            self._orphan(e)  # it hangs: the client waits for it no more
                    numbered = tuple((kept.number, kept.data) for kept in messages)
                    self._new(who, attempt, "post", (self._process(who), numbered))
                case PostAck(cursor):
                    self._new(who, 0, "ack", (str(cursor),))
                case Send(attempt, frame):
                    self._send(who, attempt, frame)
                case CloseStream(attempt) | CloseSocket(attempt):
                    self._close(who, attempt)
                case ("get", attempt, cursor):  # a standard client's
                    self._new(who, attempt, "get", (cursor,))
                case ("mcp", attempt, data):
                    self._new(who, attempt, "mcp", (data,))
                case Delete() if len(self._clients) > 1:
                    self._new(who, 0, "delete", ())
                case Over() if len(self._clients) > 1:
                    self._leave(who)
                case Open() | Delete() | Settle() | Over():  # alone in a world that is over with it
                    pass

    def _leave(self, who: int) -> None:
        """A client is over: it lets go of all that it has on the network."""
        for e in list(self._exchanges.values()):
            if e.who == who:
                self._orphan(e)
        for link in list(self._links.values()):
            if link.who == who and link.owner not in _OTHERS:
                self._close(who, link.owner)

    def _ask_once(self, who: int, attempt: int, kind: str, args: tuple[Any, ...]) -> None:
        for e in list(self._exchanges.values()):
            if e.who == who and e.owner not in _OTHERS and e.kind in _ONCE:
                self._orphan(e)
        self._new(who, attempt, kind, args)

    def _send(self, who: int, attempt: int, frame: bytes) -> None:
        for conn, link in self._links.items():
            if link.who == who and link.owner == attempt and link.alive and link.serving:
                self._links[conn] = link._replace(up=(*link.up, frame))

    def _close(self, who: int, attempt: int) -> None:
        for conn, link in list(self._links.items()):
            if link.who == who and link.owner == attempt:
                up = (*link.up, FIN) if link.alive and link.serving else ()
                self._links[conn] = link._replace(owner=0, down=(), up=up)
                self._died(conn)


setattr(_Step, "break", _Step._break)


def _whose(part: Exchange | Link) -> str:
    return "nobody" if part.owner in _OTHERS else f"the {NAMES[part.who]}, attempt {part.owner}"


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
