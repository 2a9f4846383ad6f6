"""The exploration bites: each known way to lose events, built into the real machines, is found by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest

from gapless.log.base import OwnerId, SessionKey
from gapless.log.memory import MemoryLog
from gapless.protocol import cursor as cursors
from gapless.protocol import delivery as deliveries
from gapless.protocol import door as doors
from gapless.protocol import moves
from gapless.protocol.block import Block, encode_block
from gapless.protocol.carried import Waiting
from gapless.protocol.client import Client, Phase
from gapless.protocol.cursor import Start
from gapless.protocol.delivery import ConnectionId, Deliver, Delivery, Medium
from gapless.protocol.door import TRANSITIONS, Asked, Do
from gapless.protocol.inbox import Inbox, OpenRequest
from gapless.protocol.inbox import Verdict as Judgement
from gapless.protocol.incoming import Event, Incoming
from gapless.protocol.inputs import Cursor, Handshake, Serving, Upgrade, Verdict
from gapless.protocol.jsonrpc import peek
from gapless.protocol.outbox import Outbox
from gapless.protocol.record import Record
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.seam import Boundary, SessionState
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from tests.explore.search import Found, explore
from tests.explore.world import Scenario

Patch = pytest.MonkeyPatch
PENDING, BOUND = SessionState.UPGRADE_ACCEPTED_PENDING, SessionState.WEBSOCKET_BOUND


# The server ---------------------------------------------------------------------------------------


def resume_from_the_last_ack_without_the_gap(patch: Patch) -> None:
    real = Session._bind

    def bind(self: Session, *args: Any) -> Serving:
        serving = real(self, *args)
        serving.delivery.position = serving.committed
        return serving

    patch.setattr(Session, "_bind", bind)


def a_cursor_inferred_from_what_was_written(patch: Patch) -> None:
    """Nobody writes an event twice, so whoever resumes is served from there (§1)."""
    real = Session._serve
    written: dict[bytes, int] = {}

    def serve(self: Session, connection: ConnectionId, cursor: Cursor | None, *rest: Any) -> Serving:
        serving = real(self, connection, cursor, *rest)
        serving.delivery.position = max(serving.delivery.position, written.get(self.outbox.link, 0))
        return serving

    def advance(self: Session, delivery: Delivery, position: int, now: float) -> None:
        written[self.outbox.link] = delivery.position = max(delivery.position, position)

    patch.setattr(Session, "_serve", serve)
    patch.setattr(Session, "advance", advance)


def success_after_eviction(patch: Patch) -> None:
    real = Session._prove

    def prove(self: Session, cursor: Cursor) -> Any:
        return None if cursor.stated.seq < self.outbox.floor else real(self, cursor)

    patch.setattr(Session, "_prove", prove)


def a_bare_integer_accepted_as_cursor(patch: Patch) -> None:
    real = cursors.parse_cursor

    def parse(text: str) -> Any:
        if not text.isdigit() or text == "0":
            return real(text)
        return type("Bare", (Start,), {"seq": int(text)})()

    patch.setattr(cursors, "parse_cursor", parse)


def an_unproven_link_accepted(patch: Patch) -> None:
    patch.setattr(Session, "_match_link", lambda self, cursor, held: None)


def no_echo(patch: Patch) -> None:
    real = deliveries._opening

    def opening(session: Session, delivery: Delivery) -> bytes:
        if delivery.medium is not Medium.SOCKET:
            return real(session, delivery)
        body = {"from": str(delivery.opening), "received": session.inbox.durable}
        return encode_block("resume-cursor", msgspec.json.encode(body))

    patch.setattr(deliveries, "_opening", opening)


def a_stale_echo(patch: Patch) -> None:
    """`C` is what was committed before this step appended to it."""
    real = Session._bind

    def bind(self: Session, *args: Any) -> Serving:
        delivery = real(self, *args).delivery
        delivery.gate = self.outbox.committed
        return Serving(delivery, self.outbox.committed)

    patch.setattr(Session, "_bind", bind)


def an_echo_before_its_commit(patch: Patch) -> None:
    """The answer to a handshake is released before what it appended is durable."""
    from tests.explore.server import Server

    real = Server._wait

    def wait(self: Server, rid: int, effects: Any, *rest: Any) -> None:
        waiting, later = self.waiting, self.later
        real(self, rid, effects, *rest)
        hasty = [w for w in (*self.waiting[len(waiting) :], *self.later[len(later) :]) if w[1] == "serving"]
        self.waiting = tuple(w for w in self.waiting if w not in hasty)
        self.later = tuple(w for w in self.later if w not in hasty)
        for waiter in hasty:
            self._release(waiter)

    patch.setattr(Server, "_wait", wait)


def frames_before_the_ack(patch: Patch) -> None:
    real = deliveries._limit

    def limit(session: Session, delivery: Delivery) -> int:
        gate, delivery.gate = delivery.gate, None
        try:
            return real(session, delivery)
        finally:
            delivery.gate = gate

    patch.setattr(deliveries, "_limit", limit)


def an_idle_stream_at_the_boundary(patch: Patch) -> None:
    real = doors.boundary

    def boundary(state: SessionState, event: int | None, cursor: int | None) -> Boundary:
        found = real(state, event, cursor)
        return Boundary.SERVE if found is Boundary.BURN else found

    patch.setattr(doors, "boundary", boundary)
    patch.setitem(TRANSITIONS, (PENDING, Asked.LISTEN), (Do.SERVE, PENDING))


def streams_that_go_on_past_the_door(patch: Patch) -> None:
    real = Session._open_door

    def open_door(self: Session, *args: Any) -> int:
        event = real(self, *args)
        for delivery in self.connections.values():
            delivery.stop = None
        return event

    patch.setattr(Session, "_open_door", open_door)


def a_second_upgrade_accepted(patch: Patch) -> None:
    patch.setitem(TRANSITIONS, (PENDING, Asked.UPGRADE_BELOW), (Do.OFFER, PENDING))


def a_second_upgrade_accepted_at_the_boundary(patch: Patch) -> None:
    patch.setitem(TRANSITIONS, (PENDING, Asked.UPGRADE_AT), (Do.OFFER, PENDING))


def a_live_socket_robbed(patch: Patch) -> None:
    real = Session._ask

    def ask(self: Session, asked: Asked, verdict: Verdict | None, now: float) -> Do:
        if self.door.state is BOUND:
            verdict = Verdict(self.door.generation, alive=False)
        return real(self, asked, verdict, now)

    patch.setattr(Session, "_ask", ask)


def a_fenced_socket_heard(patch: Patch) -> None:
    patch.setattr(Session, "_speaking", lambda self, id: self.connections.get(id))


def a_gap_that_is_not_pinned(patch: Patch) -> None:
    patch.setattr(Outbox, "pin_gap", lambda self, after, upto, deadline: None)


def the_ack_of_one_stream_evicts_anothers_event(patch: Patch) -> None:
    def acked(self: Outbox, mark: Any) -> bool:
        return max(self.acks.values(), default=0) >= mark.last

    patch.setattr(Outbox, "_acked", acked)


def the_replay_scanned_before_the_connection_listens(patch: Patch) -> None:
    """What is committed between the two is in neither (the reference SDK's hand-off)."""
    real, connect = deliveries.poll, Session._connect

    def connecting(self: Session, delivery: Delivery) -> Serving:
        delivery.gate_floor = self.outbox.committed  # scanned; the field is free on event streams
        return connect(self, delivery)

    def poll(session: Session, delivery: Delivery, now: float) -> Any:
        opened, began = delivery.opened, delivery.position
        step = real(session, delivery, now)
        if isinstance(step, Deliver) and not opened and delivery.medium is Medium.EVENTS:
            delivery.position = session.outbox.committed  # it listens, from here on
            return Deliver(step.control, began, max(began, min(step.upto, delivery.gate_floor)))
        return step

    patch.setattr(Session, "_connect", connecting)
    patch.setattr("gapless.protocol.session.poll", poll)


def a_repeated_message_run_again(patch: Patch) -> None:
    real = Inbox.judge

    def judge(self: Inbox, process: str, number: int, same: bool) -> Judgement:
        found = real(self, process, number, same)
        return Judgement.ACCEPT if found is Judgement.REPEAT else found

    patch.setattr(Inbox, "judge", judge)


def an_end_that_settles_nothing(patch: Patch) -> None:
    real = Session.terminate

    def terminate(self: Session, *args: Any) -> bytes:
        self.inbox.open.clear()
        return real(self, *args)

    patch.setattr(Session, "terminate", terminate)


# A server that restarts ---------------------------------------------------------------------------


def a_restart_that_keeps_an_uncommitted_event(patch: Patch) -> None:
    """Of the commit under way the log keeps the events, and not the state that they made."""
    from tests.explore.server import Server

    real = Server._on_crash

    def crash(self: Server, landed: bool) -> None:
        if not landed and self.commit is not None:
            commit, write, account = self.commit
            self.commit = commit, msgspec.structs.replace(write, record=None), account
        real(self, self.commit is not None)

    patch.setattr(Server, "_on_crash", crash)


def a_restart_that_forgets_what_was_dispatched(patch: Patch) -> None:
    real = MemoryLog.acquire

    async def acquire(self: MemoryLog, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        fence = await real(self, key, fence, owner)
        session = self._sessions[key]
        session.stored = replace(session.stored, dispatched=0)
        return fence

    patch.setattr(MemoryLog, "acquire", acquire)


def a_lost_backend_whose_requests_stay_open(patch: Patch) -> None:
    patch.setattr(Session, "settle_unknown", lambda self, request, why, now: None)


def a_dispatch_that_the_log_does_not_know_of(patch: Patch) -> None:
    patch.setattr(Session, "note_dispatched", lambda self, number: None)


def a_lost_backend_whose_requests_are_run_again(patch: Patch) -> None:
    """By the next one, in place of being answered."""

    real = Session.settle_unknown

    def again(self: Session, request: OpenRequest, why: str, now: float) -> None:
        if self.door.state is SessionState.TERMINATED:
            real(self, request, why, now)
            return
        data = b'{"jsonrpc":"2.0","id":%d,"method":"m"}' % request.id
        self.carried.waiting.append(Waiting(request.number, data, peek(data)))

    patch.setattr(Session, "settle_unknown", again)


def a_takeover_without_a_fence(patch: Patch) -> None:
    async def acquire(self: MemoryLog, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        return self._sessions[key].stored.fence

    patch.setattr(MemoryLog, "acquire", acquire)


def restored(patch: Patch, change: Callable[[Record, Session], None]) -> None:
    """What is restored from a record is changed."""
    from gapless.server import sessions

    real = sessions.restore

    def restore(record: Record, *rest: Any) -> Session:
        session = real(record, *rest)
        change(record, session)
        return session

    patch.setattr(sessions, "restore", restore)


def a_binding_taken_for_live_after_a_restart(patch: Patch) -> None:
    def bind(record: Record, session: Session) -> None:
        session.door.state, session.door.event = record.state, record.event

    restored(patch, bind)


def a_restart_that_forgets_the_ticket(patch: Patch) -> None:
    def forget(record: Record, session: Session) -> None:
        session.door.ticket = None

    restored(patch, forget)


# Retention at the door ----------------------------------------------------------------------------


def an_offer_that_pins_nothing(patch: Patch) -> None:
    """Only the handshake pins: what is evicted before it is missing in the gap."""
    real = Session._upgrade

    def upgrade(self: Session, input: Upgrade, now: float) -> Any:
        effects = real(self, input, now)
        self.outbox.pin = None
        return effects

    patch.setattr(Session, "_upgrade", upgrade)


def a_ticket_taken_for_proof(patch: Patch) -> None:
    """The cursor was covered when the ticket was issued."""
    real = Session._handshake

    def handshake(self: Session, input: Handshake, now: float) -> Any:
        if input.ticket is not None and input.ticket == self.door.ticket:
            patched = type(self)._prove
            type(self)._prove = lambda self, cursor: None
            try:
                return real(self, input, now)
            finally:
                type(self)._prove = patched
        return real(self, input, now)

    patch.setattr(Session, "_handshake", handshake)


def a_pin_that_never_lapses(patch: Patch) -> None:
    real = Outbox.pin_gap

    def pin_gap(self: Outbox, after: int, upto: int, deadline: float) -> None:
        real(self, after, upto, float("inf"))

    patch.setattr(Outbox, "pin_gap", pin_gap)


def a_pin_that_yields_to_nothing(patch: Patch) -> None:
    real = Outbox.evict

    def evict(self: Outbox, limits: Limits, now: float) -> int:
        pinned = self.pin is not None and now < self.pin.deadline
        return real(self, replace(limits, retain_bytes=1 << 40) if pinned else limits, now)

    patch.setattr(Outbox, "evict", evict)


def a_pin_that_holds_what_comes_after_its_gap(patch: Patch) -> None:
    real = Outbox.pin_gap

    def pin_gap(self: Outbox, after: int, upto: int, deadline: float) -> None:
        real(self, after, 1 << 60, deadline)

    patch.setattr(Outbox, "pin_gap", pin_gap)


# Two clients --------------------------------------------------------------------------------------


def a_number_that_is_a_repeat_whatever_it_holds(patch: Patch) -> None:
    """A newcomer's message is taken for the one that another process sent under its number."""
    real = Inbox.judge

    def judge(self: Inbox, process: str, number: int, same: bool) -> Judgement:
        return real(self, process, number, same=True)

    patch.setattr(Inbox, "judge", judge)


def a_refused_newcomer_that_never_gives_up(patch: Patch) -> None:
    real = Client._refused

    def refused(self: Client, input: moves.Refused, now: float) -> Any:
        if input.refusal is not None and input.refusal.reason is Reason.WEBSOCKET_BOUND:
            self._failures = 0
        return real(self, input, now)

    patch.setattr(Client, "_refused", refused)


def a_probe_that_is_not_answered(patch: Patch) -> None:
    real = Client._control

    def control(self: Client, block: Block, now: float) -> Any:
        return [] if block.event == "probe" else real(self, block, now)

    patch.setattr(Client, "_control", control)


def a_session_deleted_that_another_holds(patch: Patch) -> None:
    from gapless.protocol import sending

    real = sending.for_good

    def for_good(refusal: Refusal) -> Any:
        stop = real(refusal)
        stop.live = True
        return stop

    patch.setattr(sending, "for_good", for_good)


def a_silent_stream_that_is_no_end_at_the_door(patch: Patch) -> None:
    """As it was: whoever hears nothing (C8) just resumes, be it at the boundary."""
    real = Client._tick

    def tick(self: Client, now: float) -> Any:
        if self.phase is not Phase.STREAMING or now < self._heard + 2 * self.keepalive:
            return real(self, now)
        return self._drop() + self._rest(Phase.LISTENING, None, now, "nothing heard")

    patch.setattr(Client, "_tick", tick)


# The client ---------------------------------------------------------------------------------------


def the_cursor_moved_on_arrival(patch: Patch) -> None:
    real = Incoming.events

    def events(self: Incoming, run: Iterable[Block], bridging: bool) -> None:
        real(self, run, bridging)
        self.cursor = self.anchor

    patch.setattr(Incoming, "events", events)


def the_cursor_moved_before_delivery(patch: Patch) -> None:
    real = Incoming.take

    def take(self: Incoming) -> Event | None:
        event = real(self)
        if event is not None:
            self.cursor = event.id
        return event

    patch.setattr(Incoming, "take", take)


def an_end_that_settles_what_is_answered(patch: Patch) -> None:
    patch.setattr(Incoming, "answers", lambda self: frozenset[int]())


def an_end_that_forgets_what_had_arrived(patch: Patch) -> None:
    real = Client.take
    patch.setattr(Client, "take", lambda self: None if self.phase is Phase.OVER else real(self))


class Mutant(NamedTuple):
    """What is broken, where that is looked for, and the rule that is seen to be broken."""

    break_it: Callable[[Patch], None]
    scenario: Scenario
    rule: str


ONE = Scenario("one step", before=1, emits=1, faults=1, prompt=True)
TWO = Scenario("two steps", {"steps": 2}, before=1, emits=1, faults=1, prompt=True)
SLOW = Scenario("event streams, slow", {"policy": "never"}, before=1, emits=2, faults=1)
EVICTING = Scenario(
    "evicting",
    limits=Limits(retain_events=2),
    emits=4,
    faults=1,
    prompt=True,
    ends=frozenset({"cursor-evicted"}),
)
AGING = Scenario(
    "aging",
    limits=Limits(retain_seconds=5.0),
    before=2,
    emits=1,
    ages=1,
    prompt=True,
    ends=frozenset({"cursor-evicted"}),
)
SENDING = Scenario("sending", {"policy": "never"}, emits=0, asks=1, faults=1, prompt=True)
ENDING = Scenario(
    "ending", emits=0, asks=1, closes=1, prompt=True, ends=frozenset({"session-expired", "session-ended"})
)
STREAMS = Scenario(
    "streams",
    view=View.STREAM,
    limits=Limits(retain_events=3),
    emits=2,
    asks=1,
    faults=1,
    kinds=frozenset({"break"}),
    prompt=True,
)


RESTARTING = Scenario(
    "restarting",
    before=1,
    emits=1,
    faults=1,
    kinds=frozenset({"restart"}),
    prompt=True,
    ends=frozenset({"backend-lost", "gave-up"}),
)
OUTLIVING = Scenario(
    "outliving",
    {"steps": 2},
    before=1,
    emits=0,
    asks=1,
    faults=1,
    kinds=frozenset({"restart"}),
    on_backend_loss="restart",
    prompt=True,
    ends=frozenset({"gave-up"}),
)
DYING = Scenario(
    "dying",
    {"policy": "never"},
    emits=0,
    asks=2,
    faults=1,
    kinds=frozenset({"backend"}),
    on_backend_loss="restart",
    prompt=True,
    ends=frozenset({"backend-lost"}),
)
LAPSING = Scenario(
    "lapsing",
    {"steps": 2},
    limits=Limits(retain_events=2),
    before=1,
    emits=2,
    lapses=1,
    prompt=True,
    ends=frozenset({"cursor-evicted"}),
)
EMPTY = replace(
    LAPSING, name="empty", limits=Limits(retain_seconds=5.0, retain_events=60), emits=1, ages=1, lapses=0
)
FULL = Scenario(
    "full",
    limits=Limits(retain_bytes=200),
    before=1,
    emits=2,
    prompt=True,
    ends=frozenset({"cursor-evicted"}),
)
POSTING = Scenario(
    "posting",
    {"policy": "never"},
    {"policy": "never"},
    emits=0,
    asks=1,
    prompt=True,
    ends=frozenset({"message-conflict"}),
)
BOTH = Scenario(
    "both at the door",
    before=1,
    emits=0,
    second={},
    prompt=True,
    ends=frozenset({"websocket-bound", "session-ended"}),
)
BOTH_TWO = replace(BOTH, name="both, two steps", client={"steps": 2}, second={"steps": 2})


def siblings(*what: str, steps: int = 2, faults: int = 0) -> Scenario:
    """A second client that does `what`, beside one that goes through the door."""
    ends = frozenset({"non-resumable-boundary", "session-superseded"}) if steps == 2 else frozenset[str]()
    kinds = frozenset({"late"})
    return Scenario(
        "siblings", {"steps": steps}, before=1, emits=1, faults=faults, kinds=kinds, siblings=what, ends=ends
    )


MUTANTS = (
    Mutant(resume_from_the_last_ack_without_the_gap, ONE, "§11.5"),
    Mutant(a_cursor_inferred_from_what_was_written, SLOW, "C7"),
    Mutant(success_after_eviction, EVICTING, "U1, C5"),
    Mutant(a_bare_integer_accepted_as_cursor, siblings("resume at a server position"), "C2"),
    Mutant(an_unproven_link_accepted, siblings("resume at a forged cursor"), "C3"),
    Mutant(no_echo, ONE, "C7"),
    Mutant(a_stale_echo, ONE, "U2"),
    Mutant(an_echo_before_its_commit, ONE, "L2, U2"),
    Mutant(frames_before_the_ack, ONE, "U4"),
    Mutant(an_idle_stream_at_the_boundary, siblings("resume"), "B1, U10"),
    Mutant(streams_that_go_on_past_the_door, ONE, "B1, U10"),
    Mutant(a_second_upgrade_accepted, siblings("negotiate from the start"), "U7"),
    Mutant(a_second_upgrade_accepted_at_the_boundary, siblings("negotiate"), "U7"),
    Mutant(a_live_socket_robbed, siblings("resume", steps=1), "B6"),
    Mutant(a_fenced_socket_heard, siblings("resume", steps=1, faults=1), "B8"),
    Mutant(a_gap_that_is_not_pinned, AGING, "L4"),
    Mutant(the_ack_of_one_stream_evicts_anothers_event, STREAMS, "L4, M4"),
    Mutant(the_replay_scanned_before_the_connection_listens, SLOW, "§11.2"),
    Mutant(a_repeated_message_run_again, SENDING, "L6"),
    Mutant(an_end_that_settles_nothing, ENDING, "L7"),
    Mutant(a_restart_that_keeps_an_uncommitted_event, OUTLIVING, "L7"),
    Mutant(a_restart_that_forgets_what_was_dispatched, OUTLIVING, "L6"),
    Mutant(a_lost_backend_whose_requests_stay_open, DYING, "L7"),
    Mutant(a_lost_backend_whose_requests_are_run_again, DYING, "L6"),
    Mutant(a_dispatch_that_the_log_does_not_know_of, DYING, "N1"),
    Mutant(a_takeover_without_a_fence, RESTARTING, "N1"),
    Mutant(a_binding_taken_for_live_after_a_restart, RESTARTING, "§6"),
    Mutant(a_restart_that_forgets_the_ticket, replace(OUTLIVING, asks=0), "U9"),
    Mutant(an_offer_that_pins_nothing, LAPSING, "L4"),
    Mutant(a_ticket_taken_for_proof, LAPSING, "U1, C5"),
    Mutant(a_pin_that_never_lapses, LAPSING, "L4"),
    Mutant(a_pin_that_yields_to_nothing, FULL, "L4"),
    Mutant(a_pin_that_holds_what_comes_after_its_gap, EMPTY, "L4"),
    Mutant(a_number_that_is_a_repeat_whatever_it_holds, POSTING, "§11.5"),
    Mutant(a_session_deleted_that_another_holds, POSTING, "§11.5"),
    Mutant(a_refused_newcomer_that_never_gives_up, BOTH, "§11.5"),
    Mutant(a_probe_that_is_not_answered, BOTH, "§11.5"),
    Mutant(
        a_silent_stream_that_is_no_end_at_the_door,
        replace(BOTH_TWO, faults=1, kinds=frozenset({"break"})),
        "U9",
    ),
    Mutant(the_cursor_moved_on_arrival, ONE, "C4"),
    Mutant(the_cursor_moved_before_delivery, ONE, "C4"),
    Mutant(an_end_that_settles_what_is_answered, replace(ENDING, before=1), "L7"),
    Mutant(an_end_that_forgets_what_had_arrived, replace(ENDING, before=1), "L7"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.break_it.__name__)
def test_each_known_fault_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.break_it(monkeypatch)
    with pytest.raises(Found) as found:
        explore(mutant.scenario)
    told = str(found.value).splitlines()[0]
    assert told.startswith((f"Violation: {mutant.rule}:", f"{mutant.rule}:")), str(found.value)


@pytest.mark.deep
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.break_it.__name__)
def test_without_it_nothing_is_found(mutant: Mutant) -> None:
    explore(mutant.scenario)
