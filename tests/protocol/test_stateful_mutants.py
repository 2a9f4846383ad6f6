"""The stateful tests bite: each of these faults, built into the real machine, is found by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from gapless.protocol import delivery as deliveries
from gapless.protocol import outbox as outboxes
from gapless.protocol import session as sessions
from gapless.protocol.cursor import Link
from gapless.protocol.delivery import Delivery
from gapless.protocol.inbox import Inbox, Verdict
from gapless.protocol.inputs import Listen, Message
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
        self.retired = frozenset()
        return real(self, process, number, same)

    patch.setattr(Inbox, "judge", judge)


def an_event_evicted_too_early(patch: Patch) -> None:
    real = Outbox.evict

    def evict(self: Outbox, limits: Limits, now: float) -> int:
        return real(self, replace(limits, retain_events=limits.retain_events - 1), now)

    patch.setattr(Outbox, "evict", evict)


def a_link_that_leaves_out_the_type(patch: Patch) -> None:
    real = outboxes.link_after

    def link_after(previous: Link, stream: int, event: str, data: bytes) -> Link:
        return real(previous, stream, "message", data)

    patch.setattr(outboxes, "link_after", link_after)


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
    Mutant(a_stream_that_does_not_end, StreamView),
    Mutant(a_message_on_a_settled_requests_stream, StreamView),
    Mutant(an_ack_of_one_stream_that_counts_for_all, StreamView),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.break_it.__name__)
def test_each_known_fault_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant.machine, settings=SEARCH)
