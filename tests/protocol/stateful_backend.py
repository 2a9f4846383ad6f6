"""The backends of the stateful tests' sessions, one after the other: what each is given, told, asked (N1–N3).

As naive as the rest: numbers that wait, the number that was dispatched last, what a fresh backend is still
to be told. The server around the machine is here too: it hands over what is durable, to the backend that it
is for, and puts in when that has taken it all.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from gapless.protocol.carried import LISTEN, Waiting
from gapless.protocol.inputs import Dispatch, Effect, Emitted, End, Handed, Lost, Revive
from gapless.protocol.jsonrpc import peek
from gapless.protocol.refusal import Reason
from gapless.protocol.session import Session
from tests.protocol.stateful import World, json_line

__all__ = ["REQUESTS", "Backed"]

_FUTILE: Final = 3
"""So many in a row may die without having answered a request; the next one is the last."""
_PATIENCE: Final = 5
"""Inputs that a backend lets pass before it does by itself what it has to."""

_LISTS: Final = ("tools", "prompts", "resources")
_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
_WANTED: Final = {"toolsListChanged": True, "promptsListChanged": False}
_SERVERS: Final[tuple[dict[str, Any], ...]] = (
    {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"version": "1"}},
    {
        "protocolVersion": "2025-11-25",
        "capabilities": {"resources": {"subscribe": True}, "tools": {}, "logging": {}, "prompts": {}},
        "serverInfo": {"name": "ladder", "version": "2"},
    },
    {"capabilities": {}},
)
"""What backends say of themselves, no two the same."""

REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "request": ("tools/call", {"name": "t"}),
    "handshake": ("initialize", {"protocolVersion": "2025-11-25"}),
    "discovery": ("server/discover", {}),
    "level": ("logging/setLevel", {"level": "debug"}),
    "subscribe": ("resources/subscribe", {"uri": "file:///a"}),
    "unsubscribe": ("resources/unsubscribe", {"uri": "file:///a"}),
    "listen": (LISTEN, {"notifications": _WANTED}),
}
"""Requests of a client: method and params."""


class Backed(World):
    """A session's backends, each of which lives until it dies, or the server does."""

    def open_session(self) -> None:
        super().open_session()
        self.handed: list[int] = []
        """What any backend was given, ever."""
        self.incarnation = 1
        self.futile = 0
        self.server_said: dict[str, dict[str, Any]] = {}
        """What the client was told of its server, by the request that it asked with."""
        self.lists: list[str] = []
        self.orders: dict[str, int] = {}
        """What a fresh backend is to be told: the numbers of the messages."""
        self.dead: list[Any] = ["never asked"]
        """IDs of questions that nobody waits for."""
        self.fresh_backend("running")

    def fresh_backend(self, phase: str) -> None:
        """The one before is gone; until another begins, or takes messages, they wait."""
        self.phase = phase
        self.handing = self.answered = False
        self.has: dict[Any, int] = {}
        """The requests that it was given."""
        self.questions_asked = 0
        self.replays: list[int] = []
        self.news: list[dict[str, Any]] = []
        """What it is still to be told, and what the client is when it has been."""
        self.awaited: tuple[int, Any] | None = None
        """What was replayed last, if its answer is awaited: its number, and the ID that it went under."""
        self.since = self.version

    @property
    def hears(self) -> bool:
        """Whether what the backend says is heard."""
        return self.over is None and self.phase != "down"

    # Client → backend -----------------------------------------------------------------------------

    def hand_over(self) -> list[Effect]:
        """What is dispatched now (N1): all that waits, if the backend has taken what it was given before."""
        given: list[Effect] = []
        if self.phase != "running" or self.handing or self.over is not None:
            return given
        while self.waiting:
            self.dispatched = self.waiting.pop(0)
            data = self.unmarked(self.messages[self.dispatched - 1][1])
            if data is not None:
                self.note_order(self.dispatched, data)
                given.append(Dispatch(self.dispatched, data, peek(data), self.incarnation))
        self.handing, self.since = bool(given), self.version
        return given

    def note_order(self, number: int, data: bytes) -> None:
        """N2: what the client has set, and so has to be set again."""
        match json.loads(data):
            case {"method": "notifications/initialized" | "logging/setLevel" as method}:
                self.orders[method] = number
            case {"method": "resources/subscribe", "params": {"uri": uri}}:
                self.orders[uri] = number
            case {"method": "resources/unsubscribe", "params": {"uri": uri}}:
                self.orders.pop(uri, None)
            case _:
                pass

    def unmarked(self, data: bytes) -> bytes | None:
        """A message as this backend knows it; `None` if it speaks of a question that another asked (N3)."""
        message = json.loads(data)
        if self.incarnation == 1:
            return data
        if "method" not in message:
            place, name = message, "id"
        elif message["method"] == "notifications/progress":
            place, name = message["params"], "progressToken"
        else:
            return data
        mark, id = f"b{self.incarnation}.", place[name]
        if not (isinstance(id, str) and id.startswith(mark)):
            return None
        kind, id = id[len(mark)], id[len(mark) + 1 :]
        place[name] = int(id) if kind == "i" else id
        return json_line(message)

    def tell(self, effect: Effect) -> None:
        """What is dispatched is handed over once it is durable, unless what it was for is gone."""
        super().tell(effect)
        if not isinstance(effect, Dispatch) or self.over is not None:
            return
        if effect.incarnation != self.incarnation:
            return
        if effect.number:
            assert effect.number <= self.durable_dispatched, "N1: the log knows it first"
            assert not self.handed or self.handed[-1] < effect.number, "S6: once, and in order"
            self.handed.append(effect.number)
        id = effect.envelope.id
        if id in self.open:
            self.has[id] = self.open[id].number

    def backend_takes(self) -> None:
        """It has taken all that was dispatched; what came meanwhile is next."""
        self.flush()
        self.handing = False
        given = self.hand_over()
        assert self.put(Handed(self.incarnation)) == given

    # Backend → client -----------------------------------------------------------------------------

    def mark(self, id: Any) -> Any:
        """An ID of this backend's own as the client knows it (N3)."""
        if self.incarnation == 1:
            return id
        return f"b{self.incarnation}.{'i' if isinstance(id, int) else 's'}{id}"

    def emit(self, message: dict[str, Any], stream: int | None, related: Any = None) -> None:
        """The backend says something, which goes to this stream; `None` for nowhere."""
        data, told = json_line(message), deepcopy(message)
        match told:
            case {"method": _, "id": _, "params": {"_meta": meta}}:
                told["id"] = self.mark(told["id"])
                meta["progressToken"] = self.mark(meta["progressToken"])
            case {"method": "notifications/cancelled", "params": params}:
                params["requestId"] = self.mark(params["requestId"])
            case _:
                pass
        events = [(stream, json_line(told))] if stream is not None and self.hears else []
        assert self.put(Emitted(data, peek(data), related, self.incarnation), *events) == []

    def question(self, text: str) -> dict[str, Any]:
        """A question to the client; each backend counts its own from 1."""
        self.questions_asked += 1
        n = self.questions_asked
        id: Any = n if n % 3 else f"{n}"
        params = {"message": text, "_meta": {"progressToken": id}}
        return {"id": id, "method": "elicitation/create", "params": params}

    def answer_request(self, text: str, n: int, *, fails: bool) -> None:
        """The backend answers a request that it has, and then again: it was settled, that is dropped (L7)."""
        mine = [id for id, request in self.open.items() if self.has.get(id) == request.number]
        if not mine:
            return
        id = mine[n % len(mine)]
        request = self.open.pop(id)
        said: dict[str, Any] = {"error": {"code": 1, "message": text}}
        if not fails:
            said = {"result": {"text": text}}
        if not fails and request.method in ("initialize", "server/discover"):
            server = _SERVERS[n % len(_SERVERS)]
            said = {"result": server}
            self.server_said[request.method] = server
            self.orders[request.method] = request.number
            self.lists = [name for name in _LISTS if name in server["capabilities"]]
        self.answered, self.seen_at = True, self.now
        self.emit({"id": id, **said}, request.stream)
        self.emit({"id": id, **said}, None)

    # One backend, and the next --------------------------------------------------------------------

    def backend_dies(self, *, taken_over: bool = False) -> None:
        """It is gone: what it asked is withdrawn, what it had is settled, what it had not waits (N2, N3)."""
        over = self.limits.on_backend_loss == "supersede"
        if not taken_over:
            over = over or (self.incarnation == 1 and not self.answered)
            self.futile = 0 if self.answered else self.futile + 1
            over = over or self.futile > _FUTILE
        events: list[tuple[int, object]] = []
        if over:
            events = self.terminated(Reason.BACKEND_LOST, "backend-lost")
        else:
            events = [(self.withdrawn_on(), ("withdrawn", id)) for id in self.asked]
            self.dead += self.asked
            self.asked.clear()
            for id, request in list(self.open.items()):
                if request.number <= self.dispatched and request.method != LISTEN:
                    events.append((request.stream, ("error", id, "outcome-unknown")))
                    del self.open[id]
            self.incarnation += 1 if self.dispatched else 0
        self.fresh_backend("down")
        assert self.put(Lost("it is gone", taken_over), *events) == []

    def withdrawn_on(self) -> int:
        """The stream on which a question is withdrawn."""
        return 0

    def backend_begins(self) -> None:
        """A fresh one, which is told what the client has told the last (N2)."""
        self.flush()
        listens = [r.number for r in self.open.values() if r.method == LISTEN and r.number <= self.dispatched]
        self.replays = sorted({*self.orders.values(), *listens})
        orders = [Waiting(n, self.entries[n - 1], peek(self.entries[n - 1])) for n in self.replays]
        self.phase = "replaying"
        self.news = [{"method": f"notifications/{name}/list_changed"} for name in self.lists]
        if "initialize" not in self.server_said:
            self.news = []
        self.replay(Revive(tuple(orders)))

    def replay(self, input: Revive | Emitted) -> None:
        """It is told up to the next request, whose answer decides; after the last it gets what waits."""
        replayed: list[int] = []
        self.awaited, self.since = None, self.version
        while self.replays and self.awaited is None:
            number = self.replays.pop(0)
            message = json.loads(self.entries[number - 1])
            replayed.append(number)
            if message["method"] == LISTEN:
                params = {"_meta": {_SUBSCRIPTION: message["id"]}}
                self.news.append({"method": "notifications/tools/list_changed", "params": params})
            elif "id" in message:
                self.awaited = number, None
        events: list[tuple[int, object]] = []
        given: list[Effect] = []
        if self.awaited is None:
            self.phase = "running"
            events = [(0, json_line(news)) for news in self.news]
            given = self.hand_over()
        effects = self.put(input, *events)
        assert len(effects) == len(replayed) + len(given)
        assert effects[len(replayed) :] == given
        for number, effect in zip(replayed, effects[: len(replayed)], strict=True):
            self.replayed(number, effect)

    def replayed(self, number: int, effect: Effect) -> None:
        """A message as it was; but a request whose answer nobody sees has an ID that is nobody's (N3)."""
        assert isinstance(effect, Dispatch)
        assert (effect.number, effect.incarnation) == (0, self.incarnation)
        assert effect.envelope == peek(effect.data)
        was, now = json.loads(self.entries[number - 1]), json.loads(effect.data)
        if self.awaited is not None and self.awaited[0] == number:
            assert now["id"] not in self.open
            self.awaited = number, now["id"]
            was["id"] = now["id"]
        assert now == was

    def backend_answers_replay(self, how: str) -> None:
        """A fresh backend answers what was replayed: as the last one did, or not (N2)."""
        self.flush()
        assert self.awaited is not None
        number, id = self.awaited
        method = json.loads(self.entries[number - 1])["method"]
        handshake = method in ("initialize", "server/discover")
        said: dict[str, Any] = {"result": {"text": how}}
        if handshake:
            server = self.server_said[method]
            said = {"result": dict(reversed(server.items())) | {"_meta": {}, "instructions": how}}
            if how == "of another version":
                said["result"]["serverInfo"] = {"name": "ladder", "version": "3"}
            elif how == "with other capabilities":
                said["result"]["capabilities"] = {**server["capabilities"], "completions": {}}
        if how == "with an error":
            said = {"error": {"code": 1, "message": "not now"}}
        data = json_line({"id": id, **said})
        input = Emitted(data, peek(data), None, self.incarnation)
        if handshake and how != "as before":
            assert self.put(input, *self.terminated(Reason.BACKEND_LOST, "backend-lost")) == []
        else:
            self.replay(input)

    @rule(
        what=st.sampled_from(
            ["takes"] * 6 + ["begins", "begins", "answers", "answers", "dies", "is heard late"]
        ),
        how=st.sampled_from(
            ["as before"] * 5 + ["of another version", "with other capabilities", "with an error"]
        ),
    )
    def the_backend_itself(self, what: str, how: str) -> None:
        match what:
            case "takes":
                self.backend_takes()
            case "begins" if self.phase == "down" and self.over is None:
                self.backend_begins()
            case "answers" if self.awaited is not None and self.over is None:
                self.backend_answers_replay(how)
            case "dies" if self.hears:
                self.backend_dies()
            case "is heard late" if self.incarnation > 1:
                self.a_dead_one_is_heard(how)
            case _:
                pass

    def a_dead_one_is_heard(self, text: str) -> None:
        """What a dead incarnation says, or has taken, is void; and no other begins while one is there."""
        id = next(iter(self.open), 1)
        late: list[dict[str, Any]] = [
            {"id": id, "result": {"text": text}},
            {"id": 1, "method": "elicitation/create", "params": {"message": text}},
            {"method": "notifications/message", "params": {"data": text}},
        ]
        for message in late:
            data = json_line(message)
            assert self.put(Emitted(data, peek(data), None, self.incarnation - 1)) == []
        assert self.put(Handed(self.incarnation - 1)) == []
        if self.phase != "down":
            assert self.put(Revive(())) == []

    @invariant()
    def the_backend_does_what_it_has_to(self) -> None:
        """No rule, for a rule may be switched off for a whole run."""
        waited = self.version - self.since
        if waited >= _PATIENCE * (2 if self.handing else 1):
            self.backend_goes_on()
        elif self.handing and self.incarnation > 1:
            self.a_dead_one_is_heard("too late")

    def backend_goes_on(self) -> None:
        """What a backend does next."""
        if self.over is not None:
            return
        if self.phase == "down":
            self.backend_begins()
        elif self.awaited is not None:
            self.backend_answers_replay("as before")
        elif self.handing:
            self.backend_takes()

    # Restarts -------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        kept = {"incarnation": self.incarnation, "lists": list(self.lists), "orders": dict(self.orders)}
        return super().summary() | kept | {"server_said": dict(self.server_said)}

    def found(self, session: Session) -> dict[str, Any]:
        carried = session.carried
        return super().found(session) | {"incarnation": carried.incarnation, "lists": list(carried.lists)}

    def process_dies(self, *, landed: bool, expired: bool = False) -> None:
        super().process_dies(landed=landed, expired=expired)
        self.futile = 0
        self.fresh_backend("running")
        if self.over is None and expired:
            reason = Reason.SESSION_EXPIRED
            assert self.put(End(reason, ""), *self.terminated(reason, reason.value)) == []
        elif self.over is None:
            self.backend_dies(taken_over=True)

    @invariant()
    def a_fresh_backend_would_be_told_what_the_model_says(self) -> None:
        assert sorted(self.session.carried.orders.values()) == sorted(self.orders.values())

    # Beginnings -----------------------------------------------------------------------------------

    def shake_hands(self, n: int) -> None:
        """The client asks what its server is, is answered, and sets something."""
        self.client_says("handshake")
        self.backend_takes()
        self.flush()
        self.answer_request("hello", n, fails=False)
        self.client_says("initialized")
        self.client_says("level")
        self.backend_takes()

    def the_next_backend_begins(self) -> None:
        """And has been told what it has to be; then somebody takes it for the last."""
        while self.over is None and self.phase != "running":
            self.backend_goes_on()
        if self.incarnation > 1:
            self.client_says("request")
            self.a_dead_one_is_heard("hello")
            self.client_says("late reply")

    def client_says(self, kind: str) -> None:
        """An ordinary message of this kind."""
        raise NotImplementedError
