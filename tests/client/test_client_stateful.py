"""The client's machine in long random runs against a naive server, a bad network and a slow application.

`tests/explore` searches every interleaving of a few steps. Here the steps are many, the messages are
what applications really send, and much of what arrives is wrong.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gapless.errors import GaplessError, UsageError
from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.client import Client, Phase, Retry
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.incoming import Event
from gapless.protocol.jsonrpc import Kind, RequestId, peek
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
    Leave,
    Move,
    Negotiate,
    Offered,
    Open,
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
from gapless.protocol.phases import CARRYING
from gapless.protocol.refusal import Reason
from tests.client.stateful import Far, Request, Wire
from tests.explore.parts import freeze
from tests.fuzz.examples import examples

AWAITING = {
    Phase.OPENING: Open,
    Phase.LISTENING: Get,
    Phase.NEGOTIATING: Negotiate,
    Phase.KNOCKING: Knock,
}
TEXTS = st.sampled_from(
    [
        "step 3 of 10",
        "naïve café — ½ of «it»",
        "日本語のログ 🚀",
        'a "quoted" \\ path: C:\\tmp\\x',
        "first line\nsecond line\r\nthird",
        "separators \u2028 and \u2029 and \u0085",
        "x" * 300,
        "",
    ]
)
SECONDS = st.sampled_from([0.05, 0.3, 1.1, 5.0, 16.0, 31.0])
REFUSALS = st.sampled_from(
    [
        Reason.WEBSOCKET_BOUND,
        Reason.WEBSOCKET_BOUND,
        Reason.LIMIT,
        Reason.STORAGE,
        Reason.TICKET_SPENT,
        Reason.CURSOR_EVICTED,
        Reason.UPGRADE_UNAVAILABLE,
        Reason.SESSION_EXPIRED,
    ]
)
WRONG = st.sampled_from(
    ["a hole", "a repeat", "another link", "other data", "above C", "no ID", "a bare integer", "no JSON"]
)
WRONG_FIRST = st.sampled_from(["elsewhere", "nothing", "an event", "no JSON"])


class Following(RuleBasedStateMachine):
    """A client, and all that it may meet; when it is over, the next one."""

    @initialize(
        policy=st.sampled_from(["auto", "auto", "auto", "never", "require"]),
        steps=st.sampled_from([1, 2]),
        ahead=st.sampled_from([2, 256]),
        goes_on=st.booleans(),
        pace=st.sampled_from([1, 2, 12]),
        ready=st.booleans(),
    )
    def begin(
        self, policy: Any, steps: Literal[1, 2], ahead: int, goes_on: bool, pace: int, ready: bool
    ) -> None:
        self.pace = pace
        self.options: dict[str, Any] = {"policy": policy, "steps": steps, "ahead": ahead}
        self.now = 50.0
        self.ids = 0
        self.turns = 0
        self.follow(goes_on)
        if ready:
            for n in range(3):
                self.say({"method": "notifications/message", "params": {"data": "hello", "n": n}})
            self.calm(20)

    def follow(self, goes_on: bool) -> None:
        """A client opens a session, or goes on with one of a process that died."""
        self.far = Far(events=5, received=3) if goes_on else Far(0, 0)
        options = dict(self.options)
        if goes_on:
            options |= {"session": "token", "cursor": self.far.log.id(2)}
        self.client = Client(process="n", retry=Retry(door_first=0.5), **options)
        self.processed = 2 if goes_on else 0
        self.in_hand: Event | None = None
        self.requests: dict[int, tuple[Request, int]] = {}
        """What was asked and has no answer: the effect, and the turn it is from."""
        self.asked: list[Request] = []
        self.posted_on: dict[int, int] = {}
        """The latest connection that was asked for when a POST was made."""
        self.abandoned: set[int] = set()
        self.submitted: list[bytes] = []
        self.base: int | None = None
        """The number before the first message of this process."""
        self.waiting: dict[RequestId, str] = {}
        """The application's requests: `open`, `settled`, `answered`, `cancelled`."""
        self.nonce: str | None = None
        self.progress_at: float | None = None
        self.opened_at = 0
        self.stated = self.processed
        self.ended_at: int | None = None
        self.left = False
        self.arrived = self.processed
        self.put(Start())

    # The machine ----------------------------------------------------------------------------------

    def put(self, input: Input) -> list[Effect]:
        """One input, and what it makes the client do, each of it checked."""
        effects = self.client.handle(input, self.now)
        if self.client.incoming.anchor is not None:
            self.arrived = max(self.arrived, self.client.incoming.anchor.seq)
        for effect in effects:
            self.check(effect)
        if any(isinstance(e, Over) for e in effects):
            assert isinstance(effects[-1], Over), "the last word"
            self.ended_at = self.turns
            self.take_the_rest()
        return effects

    def take_the_rest(self) -> None:
        """What had arrived before the end is taken after it, and then everything is settled (L7)."""
        while True:
            before = self.processed, self.in_hand
            self.application_moves()
            if (self.processed, self.in_hand) == before:
                break
        assert self.in_hand is None
        assert self.left or self.processed == self.arrived, "on whatever connection it came"
        assert "open" not in self.waiting.values()

    def check(self, effect: Effect) -> None:
        """What it does is what its state allows."""
        assert self.ended_at is None, "after the end there is nothing"
        match effect:
            case Open():
                self.ask(effect)
            case Get(_, cursor) | Negotiate(_, cursor) | Knock(_, cursor):
                self.check_cursor(cursor)
                self.stated = cursor.seq
                self.ask(effect)
                if isinstance(effect, Negotiate):
                    assert self.nonce in (None, effect.nonce), "U9: one nonce is outstanding"
                    self.nonce = effect.nonce
            case Post(_, messages):
                under_way = [a for a, (r, _) in self.requests.items() if isinstance(r, Post)]
                assert set(under_way) <= self.abandoned, "L6: one at a time"
                numbers = [kept.number for kept in messages]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                assert numbers[0] > self.client.outgoing.received, "L6: what is received is not sent again"
                for kept in messages:
                    self.check_message(kept.number, kept.data)
                self.ask(effect)
                self.posted_on[effect.attempt] = self.client.attempt
            case Send(attempt, frame, states):
                wire = self.wire
                assert wire is not None
                assert (wire.socket, wire.attempt) == (True, attempt)
                self.check_frame(frame, states)
                self.far.take_frame(wire, frame)
            case PostAck(cursor):
                assert self.client.socket is None
                self.check_cursor(cursor)
                self.stated = cursor.seq
            case CloseStream(attempt) | CloseSocket(attempt):
                self.far.wires[attempt].heard = False
            case Settle(id):
                assert self.waiting[id] == "open", "L7: once"
                self.waiting[id] = "settled"
            case Delete():
                assert self.client.phase is Phase.OVER
            case Over(error):
                assert error is None or isinstance(error, GaplessError)

    def ask(self, request: Request) -> None:
        assert request.attempt not in self.requests
        self.requests[request.attempt] = request, self.turns
        self.asked.append(request)

    def check_cursor(self, cursor: EventId) -> None:
        """C4: what is stated is what the application has processed, neither more nor less."""
        assert cursor == self.far.log.id(self.processed)

    def check_message(self, number: int, data: bytes) -> None:
        """L6: the numbers follow each other in the order of the submissions, and a number has its bytes."""
        if self.base is None:
            self.base = number - 1
        text = self.submitted[number - 1 - self.base]
        assert data == text or (data == b"" and text in self.far.hollow)

    def check_frame(self, frame: bytes, states: bool) -> None:
        (block,) = BlockDecoder(1 << 20).feed(frame)
        assert states == (block.event == "cursor-ack")
        match block.event:
            case "message":
                self.check_message(int(block.id or ""), block.data or b"")
            case "cursor-ack":
                cursor = msgspec.json.decode(block.data or b"")["cursor"]
                assert cursor == str(self.far.log.id(self.processed))
                self.stated = self.processed
            case other:
                assert (other, block.data) == ("probe-ack", b'{"nonce":"p"}')

    @property
    def wire(self) -> Wire | None:
        """The connection in use."""
        attempt = self.client.socket if self.client.socket is not None else self.client.stream
        return None if attempt is None else self.far.wires[attempt]

    def answers(self, event: Event) -> RequestId | None:
        """The request of this application that an event answers, if it does."""
        envelope = peek(event.data) if event.event == "message" else None
        return envelope.id if envelope is not None and envelope.kind is Kind.RESPONSE else None

    # What goes by itself --------------------------------------------------------------------------

    @invariant()
    def the_world_moves_on(self) -> None:
        """Old requests are answered, connections carry on, the application takes its time, timers fire.

        No rules, for a rule may be switched off for a whole run.
        """
        self.turns += 1
        if self.ended_at is not None:
            assert self.put(Tick()) == []
            assert self.client.take() is None
            if self.turns > self.ended_at + 3:
                self.follow(self.turns % 2 > 0)
            return
        old = [r for r, turn in self.requests.values() if self.turns > turn + 2]
        for request in old[:1]:
            self.answered(request)
        self.carry(self.turns % 4)
        if self.turns % self.pace == 0:
            self.application_moves()
        deadline = self.client.deadline
        if deadline is not None and (self.now >= deadline or self.turns % 3 == 0):
            self.now = max(self.now, deadline if self.client.phase is Phase.RESTING else self.now)
            self.put(Tick())

    def answered(self, request: Request, **how: bool) -> None:
        """The server answers, honestly."""
        del self.requests[request.attempt]
        self.hand_over(request, self.far.answer(request, **how))

    def hand_over(self, request: Request, answer: Input) -> None:
        """An answer reaches the client."""
        current = request.attempt == self.client.attempt
        spent = isinstance(answer, Refused) and answer.refusal is not None
        if current and (isinstance(answer, SocketOpened) or (spent and self.spends(answer))):
            self.nonce = None
        self.opened_at = self.turns
        self.put(answer)
        if current and isinstance(request, Knock) and self.client.socket != request.attempt:
            self.lost(request.attempt)  # what is not used is closed

    def spends(self, answer: Input) -> bool:
        refusal = answer.refusal if isinstance(answer, Refused) else None
        return refusal is not None and refusal.reason is Reason.TICKET_SPENT

    def lost(self, attempt: int) -> None:
        wire = self.far.wires.get(attempt)
        if wire is not None:
            wire.alive = wire.heard = False

    def carry(self, most: int) -> None:
        """What is due on the connection in use arrives, as far as the client reads."""
        for _ in range(most):
            wire = self.wire
            if wire is None or not wire.heard:
                return
            if self.unopened(wire) and self.turns < self.opened_at + 2:
                return  # time for something wrong to come first
            due = self.far.due(wire)
            if due is None:
                return
            if isinstance(due, int):
                self.close(wire, due)
                return
            event = due.id is not None
            if (not wire.socket and not self.client.reading) or (event and self.client.full):
                return
            self.far.wrote(wire)
            if due.event == "received" and not wire.socket:
                # §12: a POST made before this connection was asked for is not waited for.
                self.abandoned |= {post for post, on in self.posted_on.items() if on < wire.attempt}
            more: list[Block] = []
            while event and len(more) + 1 < min(self.client.room, most):
                follows = self.far.due(wire)
                if not isinstance(follows, Block) or follows.id is None:
                    break
                self.far.wrote(wire)
                more.append(follows)
            self.put(Arrived(wire.attempt, due, tuple(more)))

    def close(self, wire: Wire, code: int) -> None:
        """The connection ends, in order or not."""
        wire.alive = wire.heard = False
        self.put(SocketClosed(wire.attempt, code) if wire.socket else StreamEnded(wire.attempt))

    def application_moves(self) -> None:
        """It takes an event, or accepts the one it has in its hands."""
        event = self.in_hand
        if event is None:
            event = self.client.take()
            if event is None:
                return
            assert event.id == self.far.log.id(self.processed + 1), "S1: the next, and no other"
            block = self.far.blocks[self.processed]
            assert (event.event, event.data) == (block.event, block.data)
            wanted = self.client.wanted(event)
            self.see(event, wanted)
            self.in_hand = event
            if wanted:
                return
        self.in_hand = None
        self.processed += 1
        if self.progress_at is None:
            self.progress_at = self.now
        self.put(Delivered())

    def see(self, event: Event, wanted: bool) -> None:
        """L7: of a request the application sees one end. After the end it is asked nothing."""
        asks = peek(event.data).kind is Kind.REQUEST if event.event == "message" else False
        if event.event != "message" or (asks and self.ended_at is not None):
            assert not wanted
            return
        id = self.answers(event)
        how = self.waiting.get(id) if id is not None else None
        assert wanted == (how != "settled")
        if id is not None and how == "open":
            self.waiting[id] = "answered"

    # The server -----------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["notes", "notes", "question", "answer", "answer", "end"]),
        count=st.integers(1, 8),
        text=TEXTS,
    )
    def the_server_speaks(self, what: str, count: int, text: str) -> None:
        match what:
            case "answer":
                for id in list(self.far.open)[:count]:
                    self.far.respond(id, text)
            case "question":
                self.say({"id": f"q{count}", "method": "ping", "params": {"text": text}})
            case "end" if self.far.head > 12:
                for id in list(self.far.open)[: count % 3]:  # some are answered at the last moment
                    self.far.respond(id, text)
                self.far.end(Reason.SESSION_EXPIRED, "session-expired")
            case _:
                for n in range(count):
                    self.say({"method": "notifications/message", "params": {"data": text, "n": n}})

    def say(self, message: dict[str, Any]) -> None:
        self.far.emit(msgspec.json.encode({"jsonrpc": "2.0", **message}))

    # The application ------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["request"] * 4 + ["note", "cancel", "reply", "same id", "large", "move", "rush", "leave"]
        ),
        text=TEXTS,
    )
    def the_application_acts(self, what: str, text: str) -> None:
        open_now = [id for id, how in self.waiting.items() if how == "open"]
        self.ids += 1
        match what:
            case "move":
                self.put(Move())
            case "leave" if self.ids % 4 == 0:
                self.left = True
                self.put(Leave())
            case "rush":
                for _ in range(12):
                    self.application_moves()
            case "cancel" if open_now:
                if self.ended_at is None:
                    self.waiting[open_now[0]] = "cancelled"
                self.submit({"method": "notifications/cancelled", "params": {"requestId": open_now[0]}})
            case "reply":
                self.submit({"id": "q1", "result": {"text": text}})
            case "same id" if open_now and self.ended_at is None:
                self.submit_again(open_now[0])
            case "large":
                self.submit({"id": self.ids, "method": "tools/call", "params": {"text": text + "y" * 400}})
            case "note" | "leave":
                self.submit({"method": "notifications/roots/list_changed", "params": {"text": text}})
            case _:
                id: RequestId = self.ids if self.ids % 3 else f"{self.ids}"
                self.submit({"id": id, "method": "tools/call", "params": {"text": text}})

    def submit(self, message: dict[str, Any]) -> None:
        """A message; one above the limit that the server has told is refused here (W5)."""
        data = msgspec.json.encode({"jsonrpc": "2.0", **message})
        envelope = peek(data)
        if self.ended_at is not None:
            assert self.put(Submit(data, envelope)) == []
            return
        request = envelope.id if envelope.kind is Kind.REQUEST else None
        if request is not None:
            self.waiting[request] = "open"
        limit = self.client.limits.get("message")
        if limit is None or len(data) <= limit:
            self.submitted.append(data)
            self.put(Submit(data, envelope))
            return
        settle, *_ = self.put(Submit(data, envelope))
        assert isinstance(settle, Settle)
        assert (settle.id, settle.data["reason"]) == (request, "too-large")

    def submit_again(self, id: RequestId) -> None:
        """A call that cannot be raises, and changes nothing."""
        data = msgspec.json.encode({"jsonrpc": "2.0", "id": id, "method": "ping"})
        before = freeze(self.client)
        with pytest.raises(UsageError):
            self.client.handle(Submit(data, peek(data)), self.now)
        assert freeze(self.client) == before

    # The network ----------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["answer"] * 3
            + ["cut"] * 2
            + ["no answer", "eaten", "page", "refusal", "malformed", "malformed", "deaf", "probe"]
        ),
        n=st.integers(0, 5),
        reason=REFUSALS,
        code=st.sampled_from([1006, 1006, 4408, 4410, 4409, 1012, 1001]),
    )
    def the_network_acts(self, what: str, n: int, reason: Reason, code: int) -> None:
        wire = self.wire
        if what == "cut":
            if wire is not None:
                self.close(wire, code if wire.heard else 1006)
            return
        if what == "deaf":
            if wire is not None:
                wire.heard = False
            return
        if what == "malformed":
            self.refuse_a_message()
            return
        if what == "probe":
            if wire is not None and wire.socket and wire.heard and not self.unopened(wire):
                self.put(Arrived(wire.attempt, Block("probe", data=b'{"nonce":"p"}')))
            return
        if not self.requests:
            return
        request = list(self.requests.values())[n % len(self.requests)][0]
        if what == "answer":
            self.answered(request, takes_over=n % 2 > 0, **({"echo": False} if n > 3 else {}))
            return
        del self.requests[request.attempt]
        if what != "refusal" and n % 2:
            self.far.answer(request)  # it got there, and the answer is lost
            self.lost(request.attempt)
        self.hand_over(request, self.fault(request, what, reason))

    def refuse_a_message(self) -> None:
        """The server does not like the first message of a POST, or else the next on a socket."""
        post = next((r for r, _ in self.requests.values() if isinstance(r, Post)), None)
        if post is None:
            self.far.ill_tempered = True
        elif self.far.refuse_message(post.messages[0]):
            del self.requests[post.attempt]
            self.hand_over(post, self.far.refuse(post.attempt, Reason.MALFORMED))

    def fault(self, request: Request, what: str, reason: Reason) -> Input:
        """An answer that is none of the server's, or an ill-tempered one."""
        attempt = request.attempt
        match what:
            case "refusal" if not isinstance(request, Open | Post):
                return self.far.refuse(attempt, reason)
            case "refusal" if isinstance(request, Post):
                return self.far.refuse(attempt, Reason.LIMIT)
            case "eaten" if isinstance(request, Knock):
                return Refused(attempt, 426, None)
            case "page":
                return Refused(attempt, 502, None)
            case _:
                return Failed(attempt, "reset")

    def unopened(self, wire: Wire) -> bool:
        """Whether its first block is still to come."""
        return bool(wire.first) and (wire.first[0].id is not None or wire.first[0].event == "resume-cursor")

    @rule(kind=WRONG, first=WRONG_FIRST)
    def something_wrong_arrives(self, kind: str, first: str) -> None:
        """C7, U2, U3: the connection is dropped, and nothing of it reaches the application."""
        wire = self.wire
        if wire is None or not wire.heard or (not wire.socket and not self.client.reading):
            return
        block = self.wrong_first(wire, first) if self.unopened(wire) else self.wrong(wire, kind)
        if block is None:
            return
        anchor = self.client.incoming.anchor
        self.put(Arrived(wire.attempt, block))
        assert self.wire is None, "it is dropped"
        assert self.client.incoming.anchor == anchor
        assert self.client.phase in (Phase.RESTING, Phase.OVER)

    def wrong_first(self, wire: Wire, kind: str) -> Block | None:
        """A first block that does not open this connection."""
        at = self.far.log.id(wire.at)
        other = EventId(at.seq + 1, 0, at.link)
        match kind:
            case "elsewhere" if wire.socket:
                body = {"cursor": wire.gate, "from": str(other), "received": 0}
                return Block("resume-cursor", data=msgspec.json.encode(body))
            case "elsewhere":
                return Block(id=str(other), data=b"", retry=100)
            case "nothing" if wire.socket:
                return Block("resume-cursor", data=b'{"from":"%s"}' % str(at).encode())
            case "no JSON" if wire.socket:
                return Block("resume-cursor", data=b"{")
            case "an event" if wire.at < self.far.head:
                return self.far.blocks[wire.at]
            case _:
                return None

    def wrong(self, wire: Wire, kind: str) -> Block | None:
        """A block that does not follow what came before it on this connection."""
        at, head = wire.at, self.far.head
        here = self.far.log.id(at)
        match kind:
            case "a hole" if at + 1 < head:
                return self.far.blocks[at + 1]
            case "a repeat" if at > 0:
                return self.far.blocks[at - 1]
            case "another link" if at < head:
                id = self.far.log.id(at + 1)
                link = Link(bytes(b ^ 1 for b in id.link))
                return Block(
                    self.far.blocks[at].event, str(EventId(id.seq, 0, link)), self.far.blocks[at].data
                )
            case "other data" if at < head:
                return Block("message", str(self.far.log.id(at + 1)), b'{"jsonrpc":"2.0"}')
            case "above C" if wire.gate == at < head:
                return self.far.blocks[at]
            case "no ID":
                return Block("message", "", b"{}")
            case "a bare integer":
                return Block("message", str(here.seq + 1), b"{}")
            case "no JSON":
                return Block("received", data=b'{"received":')
            case _:
                return None

    @rule(kind=st.integers(0, 7), n=st.integers(0, 30))
    def something_late_arrives(self, kind: int, n: int) -> None:
        """What comes from an older attempt is void, and changes nothing."""
        live = {self.client.attempt, self.client.stream, self.client.socket, self.client.sending.attempt}
        old = [r.attempt for r in self.asked if r.attempt not in live]
        if not old:
            return
        attempt, id = old[n % len(old)], self.far.log.id(self.far.head)
        input: Input = (
            StreamOpened(attempt),
            Arrived(attempt, Block("message", str(id), b"{}")),
            StreamEnded(attempt),
            SocketClosed(attempt, 4404),
            SocketOpened(attempt, 10_000),
            Offered(attempt, "an old ticket"),
            self.far.refuse(attempt, Reason.SESSION_UNKNOWN),
            Received(attempt, 10_000),
        )[kind]
        before = freeze(self.client)
        assert self.put(input) == []
        assert freeze(self.client) == before

    @rule(seconds=SECONDS, evicts=st.integers(0, 12))
    def time_passes(self, seconds: float, evicts: int) -> None:
        """Timers fire in their order; a server's floor may rise to what was acknowledged."""
        until = self.now + seconds
        ticks = 0
        while (deadline := self.client.deadline) is not None and deadline <= until:
            self.now, ticks = max(self.now, deadline), ticks + 1
            self.put(Tick())
            assert ticks < 50, "a timer that does not go off"
        self.now = until
        wire = self.wire
        if wire is not None and wire.alive and wire.heard and not self.unopened(wire):
            self.put(Arrived(wire.attempt, Block("keepalive", data=b"{}") if wire.socket else None))
        self.far.floor = max(self.far.floor, min(self.stated, self.far.head - evicts))

    # The end --------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """S5: once faults stop, it gets up to date, or to an explicit end, in a bounded number of steps."""
        if hasattr(self, "far"):
            self.calm(400)
            assert self.at_rest(), f"{self.client.phase} at {self.processed} of {self.far.head}"

    def calm(self, most: int) -> None:
        for _ in range(most):
            if self.at_rest():
                return
            self.turns += 1
            for request, _ in list(self.requests.values()):
                self.answered(request)
            wire = self.wire
            if wire is not None and not wire.heard:
                self.close(wire, 1006)
            self.carry(20)
            for id in list(self.far.open):
                self.far.respond(id, "done")
            for _ in range(20):
                self.application_moves()
            if not self.requests and self.client.deadline is not None and self.client.phase is Phase.RESTING:
                self.now = max(self.now, self.client.deadline)
                self.put(Tick())
            elif self.client.sending.wake is not None:
                self.now = max(self.now, self.client.sending.wake)
                self.put(Tick())

    def at_rest(self) -> bool:
        """Nothing is left to do, on either side."""
        if self.client.phase is Phase.OVER:
            return True
        wire = self.wire
        return (
            self.client.phase in CARRYING
            and wire is not None
            and wire.heard
            and self.far.due(wire) is None
            and self.processed == self.far.head
            and not self.client.outgoing.kept
            and not self.client.outgoing.waiting
        )

    # Always ---------------------------------------------------------------------------------------

    @invariant()
    def what_the_machine_says_of_itself_is_true(self) -> None:
        client = self.client
        if client.phase is Phase.OVER:
            assert client.deadline is None
            return
        if client.session is not None:
            assert client.cursor == self.far.log.id(self.processed), "never past what was delivered"
        open_now = {id for id, how in self.waiting.items() if how == "open"}
        refused = {self.answers(self.in_hand)} if self.in_hand is not None else set()
        assert set(client.outgoing.waiting) - refused == open_now - refused
        assert (client.socket is not None) == (client.phase in (Phase.BRIDGING, Phase.BOUND))

    @invariant()
    def it_never_waits_for_nothing(self) -> None:
        client = self.client
        if client.phase in AWAITING:
            request, _ = self.requests[client.attempt]
            assert isinstance(request, AWAITING[client.phase])
        elif client.phase is not Phase.OVER:
            assert client.deadline is not None or client.full, "the application takes what there is"

    @invariant()
    def it_acknowledges_in_time(self) -> None:
        """U3: the gap, once it is processed. U5: at 64 events, or within a second."""
        if self.stated >= self.processed:
            self.progress_at = None
        wire = self.wire
        if wire is None or not wire.socket or self.client.phase is Phase.OVER or self.unopened(wire):
            return
        reached = self.processed >= (self.client.incoming.gap or 0)
        assert (self.client.phase is Phase.BOUND) == (self.client.incoming.gap is None)
        assert self.client.phase is Phase.BOUND or not reached
        assert self.processed - self.stated < 64
        if self.client.phase is Phase.BOUND and self.progress_at is not None:
            deadline = self.client.deadline
            assert deadline is not None
            assert deadline <= self.progress_at + 1.0


@pytest.mark.hypothesis
@pytest.mark.rule("S1", "S2", "S5", "C4", "C7", "L6", "L7", "U3", "U5", "U9")
def test_whatever_arrives_the_client_follows_or_ends_out_loud() -> None:
    long = settings(max_examples=examples(0.6), stateful_step_count=40)
    run_state_machine_as_test(Following, settings=long)
