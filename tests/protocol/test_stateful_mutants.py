"""The stateful tests bite: each of these faults, built into the real machine, is found by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from gapless.protocol import delivery as deliveries
from gapless.protocol import outbox as outboxes
from gapless.protocol import record as records
from gapless.protocol import recovery
from gapless.protocol import session as sessions
from gapless.protocol.carried import Carried, Waiting
from gapless.protocol.cursor import Link
from gapless.protocol.delivery import Delivery
from gapless.protocol.door import Door, Pending
from gapless.protocol.inbox import Inbox, Verdict
from gapless.protocol.inputs import Acked, Effect, Emitted, Handed, Listen, Lost, Message, Offered, Upgrade
from gapless.protocol.jsonrpc import Envelope
from gapless.protocol.marks import Mark
from gapless.protocol.outbox import Outbox
from gapless.protocol.seam import Cover, SessionState, cover
from gapless.protocol.session import Commit, Session
from gapless.protocol.settings import Limits
from gapless.protocol.streams import Streams
from tests.fuzz.examples import SEARCH
from tests.protocol.test_session_stateful import SessionView
from tests.protocol.test_streams_stateful import StreamView

Patch = pytest.MonkeyPatch
PENDING = SessionState.UPGRADE_ACCEPTED_PENDING


def a_floor_that_is_one_too_low(patch: Patch) -> None:
    patch.setattr(sessions, "cover", lambda cursor, floor, committed: cover(cursor + 1, floor, committed))


def a_floor_that_is_one_too_high(patch: Patch) -> None:
    def off(cursor: int, floor: int, committed: int) -> Cover:
        return Cover.EVICTED if cursor == floor > 0 else cover(cursor, floor, committed)

    patch.setattr(sessions, "cover", off)


def a_burn_that_settles_nothing(patch: Patch) -> None:
    real = Session._burn

    def burn(self: Session, input: Listen, now: float) -> Any:
        self.inbox.open.clear()
        return real(self, input, now)

    patch.setattr(Session, "_burn", burn)


def an_event_above_the_gap_before_its_ack(patch: Patch) -> None:
    real = deliveries._limit

    def limit(session: Session, delivery: Delivery) -> int:
        gate = None if delivery.gate is None else delivery.gate + 1
        return real(session, replace(delivery, gate=gate))

    patch.setattr(deliveries, "_limit", limit)


def a_hole_that_is_not_told(patch: Patch) -> None:
    real = deliveries._received
    patch.setattr(deliveries, "_received", lambda number, resend: real(number, False))


def a_message_acknowledged_before_it_is_durable(patch: Patch) -> None:
    real = Inbox.accept

    def accept(self: Inbox, process: str | None) -> int:
        self.durable = real(self, process)
        return self.durable

    patch.setattr(Inbox, "accept", accept)


def an_event_delivered_before_it_is_durable(patch: Patch) -> None:
    real = Session.take

    def take(self: Session) -> Commit:
        commit = real(self)
        self.outbox.confirm(commit.segment.last)
        return commit

    patch.setattr(Session, "take", take)


def a_process_that_is_not_recorded(patch: Patch) -> None:
    """As it was: a process whose first message ran nothing was not in the record."""
    real = Session._record

    def record(self: Session, input: Message, data: bytes) -> int:
        changed = self._changed
        number = real(self, input, data)
        self._changed = changed or bool(data)
        return number

    patch.setattr(Session, "_record", record)


def a_retired_process_that_is_heard(patch: Patch) -> None:
    real = Inbox.judge

    def judge(self: Inbox, process: str, number: int, same: bool) -> Verdict:
        self.retired = ()
        return real(self, process, number, same)

    patch.setattr(Inbox, "judge", judge)


def an_event_evicted_too_early(patch: Patch) -> None:
    real = Outbox.evict

    def evict(self: Outbox, limits: Limits, now: float) -> int:
        return real(self, replace(limits, retain_events=limits.retain_events - 1), now)

    patch.setattr(Outbox, "evict", evict)


def a_link_that_leaves_out_the_type(patch: Patch) -> None:
    real = outboxes.links_after

    def links_after(previous: Link, stream: int, event: str, run: Iterable[bytes]) -> list[Link]:
        return real(previous, stream, "message", run)

    patch.setattr(outboxes, "links_after", links_after)


def a_stream_that_does_not_end(patch: Patch) -> None:
    patch.setattr(Streams, "finish", lambda self, stream: None)


def a_message_on_a_settled_requests_stream(patch: Patch) -> None:
    real = Streams.route

    def route(self: Streams, inbox: Inbox, envelope: Any, related: Any, listening: bool) -> int:
        if related is not None and related not in inbox.open:
            return self.next - 1
        return real(self, inbox, envelope, related, listening)

    patch.setattr(Streams, "route", route)


def an_ack_of_one_stream_that_counts_for_all(patch: Patch) -> None:
    real = Outbox.ack

    def ack(self: Outbox, stream: int, seq: int) -> bool:
        for other in (*self.acks, stream):
            real(self, other, seq)
        return True

    patch.setattr(Outbox, "ack", ack)


def a_handshake_that_was_refused_and_spends_the_ticket(patch: Patch) -> None:
    real = Session._dropped
    patch.setattr(
        Session,
        "_dropped",
        lambda self, input, now: real(self, msgspec.structs.replace(input, pending=None), now),
    )


def a_handshake_that_was_refused_and_concludes_the_nonce(patch: Patch) -> None:
    def reopen(self: Door, pending: Pending) -> None:
        self.ticket, self.shown = pending

    patch.setattr(Door, "reopen", reopen)


def a_second_negotiator_whose_gap_is_not_pinned(patch: Patch) -> None:
    patch.setattr(Session, "_pin_also", lambda self, cursor, now: None)


def an_upgrade_judged_before_its_cursor_is_acknowledged(patch: Patch) -> None:
    real = Session._upgrade

    def upgrade(self: Session, input: Upgrade, now: float) -> list[Effect]:
        acks, pin = dict(self.outbox.acks), self.outbox.pin
        effects = real(self, input, now)
        if not isinstance(effects[0], Offered):
            self.outbox.acks, self.outbox.pin = acks, pin
        return effects

    patch.setattr(Session, "_upgrade", upgrade)


# Of what becomes of a session whose backend is gone (N1–N3)


def losing(patch: Patch, change: Callable[[Session, Lost, Callable[[], list[Effect]]], list[Effect]]) -> None:
    """A loss that goes otherwise."""
    real = recovery.lost

    def lost(session: Session, input: Lost, now: float) -> list[Effect]:
        return change(session, input, lambda: real(session, input, now))

    patch.setattr(sessions, "lost", lost)


def restored(patch: Patch, change: Callable[[Session], None]) -> None:
    """A restart that finds something else."""
    real = records.restore

    def restore(*args: Any) -> Session:
        session = real(*args)
        change(session)
        return session

    patch.setattr(records, "restore", restore)


def a_loss_that_settles_nothing(patch: Patch) -> None:
    def change(session: Session, input: Lost, real: Callable[[], list[Effect]]) -> list[Effect]:
        open, session.inbox.open = session.inbox.open, {}
        effects = real()
        session.inbox.open = open
        return effects

    losing(patch, change)


def a_loss_that_settles_what_was_not_dispatched(patch: Patch) -> None:
    def change(session: Session, input: Lost, real: Callable[[], list[Effect]]) -> list[Effect]:
        dispatched, session.dispatched = session.dispatched, session.inbox.received
        waiting, session.carried.waiting = session.carried.waiting, []
        effects = real()
        session.dispatched, session.carried.waiting = dispatched, waiting
        return effects

    losing(patch, change)


def a_loss_that_withdraws_nothing(patch: Patch) -> None:
    def change(session: Session, input: Lost, real: Callable[[], list[Effect]]) -> list[Effect]:
        session.inbox.asked.clear()
        return real()

    losing(patch, change)


def a_message_dispatched_again_after_a_restart(patch: Patch) -> None:
    dispatched: list[Waiting] = []
    real = Carried.note

    def note(self: Carried, number: int, data: bytes, envelope: Envelope) -> None:
        dispatched[:] = [Waiting(number, data, envelope)]
        real(self, number, data, envelope)

    def change(session: Session, input: Lost, real: Callable[[], list[Effect]]) -> list[Effect]:
        if input.taken_over:
            session.carried.waiting[:0] = dispatched
        return real()

    patch.setattr(Carried, "note", note)
    losing(patch, change)


def a_message_handed_over_before_the_log_says_so(patch: Patch) -> None:
    real = Session.take
    patch.setattr(Session, "take", lambda self: msgspec.structs.replace(real(self), dispatched=None))


def a_restart_that_forgets_what_waits(patch: Patch) -> None:
    restored(patch, lambda session: session.carried.waiting.clear())


def a_restart_that_forgets_the_pin(patch: Patch) -> None:
    def change(session: Session) -> None:
        session.outbox.pin = None

    restored(patch, change)


def a_restart_that_knows_a_single_run(patch: Patch) -> None:
    """As it was: what a log retained was one run for eviction."""
    real: Callable[..., None] = Outbox.resume

    def resume(self: Outbox, *args: Any) -> None:
        *rest, runs = args
        real(self, *rest, runs[-1:])

    patch.setattr(Outbox, "resume", resume)


def a_restart_that_forgets_which_incarnation_it_was(patch: Patch) -> None:
    def change(session: Session) -> None:
        session.carried.incarnation = 1

    restored(patch, change)


def a_restart_that_forgets_what_is_evicted_of_a_stream(patch: Patch) -> None:
    patch.setattr(records, "_kept", lambda session: ())


def a_restart_that_forgets_which_questions_were_answered(patch: Patch) -> None:
    def change(session: Session) -> None:
        session.streams._questions = frozenset()

    restored(patch, change)


def an_ack_that_is_told_before_it_is_durable(patch: Patch) -> None:
    real = Session._acked

    def acked(self: Session, input: Acked, now: float) -> list[Effect]:
        changed = self._changed
        effects = real(self, input, now)
        self._changed = changed
        return effects

    patch.setattr(Session, "_acked", acked)


def an_answer_handed_to_a_backend_that_never_asked(patch: Patch) -> None:
    real = recovery.to_backend
    patch.setattr(
        recovery, "to_backend", lambda mark, data, envelope: real(mark, data, envelope) or (data, envelope)
    )


def ids_that_bear_no_mark(patch: Patch) -> None:
    patch.setattr(Carried, "mark", property(lambda self: Mark("")))


def a_dead_backend_that_is_heard(patch: Patch) -> None:
    real = Session._emitted

    def emitted(self: Session, input: Emitted, now: float) -> list[Effect]:
        return real(self, msgspec.structs.replace(input, incarnation=0), now)

    patch.setattr(Session, "_emitted", emitted)


def a_backend_that_takes_nothing(patch: Patch) -> None:
    patch.setattr(Session, "_handed", lambda self, input: [])


def a_backend_that_is_given_more_before_it_has_taken_the_last(patch: Patch) -> None:
    real = recovery.hand_over

    def hand_over(session: Session) -> list[Effect]:
        session.carried.handing = False
        return real(session)

    patch.setattr(sessions, "hand_over", hand_over)


def a_dead_backend_that_is_said_to_have_taken_something(patch: Patch) -> None:
    real = Session._handed

    def handed(self: Session, input: Handed) -> list[Effect]:
        return real(self, Handed(self.carried.incarnation))

    patch.setattr(Session, "_handed", handed)


def a_fresh_backend_that_may_be_any_other(patch: Patch) -> None:
    patch.setattr(recovery, "said_in", lambda data: (b"", ()))
    patch.setattr(Carried, "tell", lambda self, method, number, data: self.told.update({method: b""}))


def a_fresh_backend_that_is_told_nothing(patch: Patch) -> None:
    real = recovery.revive
    patch.setattr(
        sessions,
        "revive",
        lambda session, input, now: real(session, msgspec.structs.replace(input, orders=()), now),
    )


def a_backend_that_may_die_for_ever(patch: Patch) -> None:
    patch.setattr(recovery, "FUTILE", 1 << 30)


class Mutant(NamedTuple):
    """What is broken, and where that must show."""

    break_it: Callable[[Patch], None]
    machine: type[RuleBasedStateMachine]


MUTANTS = (
    Mutant(a_floor_that_is_one_too_low, SessionView),
    Mutant(a_floor_that_is_one_too_high, SessionView),
    Mutant(a_burn_that_settles_nothing, SessionView),
    Mutant(an_event_above_the_gap_before_its_ack, SessionView),
    Mutant(a_hole_that_is_not_told, SessionView),
    Mutant(a_message_acknowledged_before_it_is_durable, SessionView),
    Mutant(an_event_delivered_before_it_is_durable, SessionView),
    Mutant(a_process_that_is_not_recorded, SessionView),
    Mutant(a_retired_process_that_is_heard, SessionView),
    Mutant(an_event_evicted_too_early, SessionView),
    Mutant(a_link_that_leaves_out_the_type, SessionView),
    Mutant(a_handshake_that_was_refused_and_spends_the_ticket, SessionView),
    Mutant(a_handshake_that_was_refused_and_concludes_the_nonce, SessionView),
    Mutant(a_second_negotiator_whose_gap_is_not_pinned, SessionView),
    Mutant(an_upgrade_judged_before_its_cursor_is_acknowledged, SessionView),
    Mutant(a_loss_that_settles_nothing, SessionView),
    Mutant(a_loss_that_settles_what_was_not_dispatched, SessionView),
    Mutant(a_loss_that_withdraws_nothing, SessionView),
    Mutant(a_message_dispatched_again_after_a_restart, SessionView),
    Mutant(a_message_handed_over_before_the_log_says_so, SessionView),
    Mutant(a_restart_that_forgets_what_waits, SessionView),
    Mutant(a_restart_that_forgets_the_pin, SessionView),
    Mutant(a_restart_that_knows_a_single_run, SessionView),
    Mutant(a_restart_that_forgets_which_incarnation_it_was, SessionView),
    Mutant(an_ack_that_is_told_before_it_is_durable, SessionView),
    Mutant(an_answer_handed_to_a_backend_that_never_asked, SessionView),
    Mutant(ids_that_bear_no_mark, SessionView),
    Mutant(a_dead_backend_that_is_heard, SessionView),
    Mutant(a_backend_that_takes_nothing, SessionView),
    Mutant(a_backend_that_is_given_more_before_it_has_taken_the_last, SessionView),
    Mutant(a_dead_backend_that_is_said_to_have_taken_something, SessionView),
    Mutant(a_fresh_backend_that_may_be_any_other, SessionView),
    Mutant(a_fresh_backend_that_is_told_nothing, SessionView),
    Mutant(a_backend_that_may_die_for_ever, SessionView),
    Mutant(a_restart_that_forgets_what_is_evicted_of_a_stream, StreamView),
    Mutant(a_restart_that_forgets_which_questions_were_answered, StreamView),
    Mutant(a_stream_that_does_not_end, StreamView),
    Mutant(a_message_on_a_settled_requests_stream, StreamView),
    Mutant(an_ack_of_one_stream_that_counts_for_all, StreamView),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.break_it.__name__)
def test_each_known_fault_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant.machine, settings=SEARCH)
