"""The exploration bites: each known way to lose events, built into the real machines, is found by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gapless.protocol import delivery as deliveries
from gapless.protocol import door as doors
from gapless.protocol.block import encode_block
from gapless.protocol.delivery import Deliver, Delivery, Medium
from gapless.protocol.door import TRANSITIONS, Asked, Do
from gapless.protocol.incoming import Incoming
from gapless.protocol.inputs import Handshake, Serving, Verdict
from gapless.protocol.outbox import Outbox
from gapless.protocol.seam import Boundary, SessionState
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from tests.explore.search import Found, explore
from tests.explore.world import Scenario

Patch = pytest.MonkeyPatch
PENDING, BOUND = SessionState.UPGRADE_ACCEPTED_PENDING, SessionState.WEBSOCKET_BOUND


def resume_from_the_last_ack_without_the_gap(patch: Patch) -> None:
    real = Session._bind

    def bind(self: Session, input: Handshake, event: int | None, now: float) -> Serving:
        serving = real(self, input, event, now)
        serving.delivery.position = serving.committed
        return serving

    patch.setattr(Session, "_bind", bind)


def success_after_eviction(patch: Patch) -> None:
    real = Session._prove

    def prove(self: Session, cursor: Any) -> Any:
        return None if cursor.stated.seq < self.outbox.floor else real(self, cursor)

    patch.setattr(Session, "_prove", prove)
    patch.setattr(deliveries, "_missed", lambda session, delivery: _skip(session, delivery))


def _skip(session: Session, delivery: Delivery) -> bool:
    delivery.position = session.outbox.floor
    return False


def a_server_position_accepted_as_cursor(patch: Patch) -> None:
    patch.setattr(Session, "_match_link", lambda self, cursor, held: None)


def no_echo(patch: Patch) -> None:
    real = deliveries._opening

    def opening(session: Session, delivery: Delivery) -> bytes:
        if delivery.medium is Medium.SOCKET:
            return encode_block("received", b'{"received":0}')
        return real(session, delivery)

    patch.setattr(deliveries, "_opening", opening)


def a_stale_echo(patch: Patch) -> None:
    real = Session._bind

    def bind(self: Session, input: Handshake, event: int | None, now: float) -> Serving:
        before = input.cursor.stated.seq
        serving = real(self, input, event, now)
        serving.delivery.gate = before
        return serving

    patch.setattr(Session, "_bind", bind)


def frames_before_the_ack(patch: Patch) -> None:
    patch.setattr(deliveries, "_limit", lambda session, delivery: session.outbox.committed)


def an_idle_stream_at_the_boundary(patch: Patch) -> None:
    real = doors.boundary

    def boundary(state: SessionState, event: int | None, cursor: int | None) -> Boundary:
        found = real(state, event, cursor)
        return Boundary.SERVE if found is Boundary.BURN else found

    patch.setattr(doors, "boundary", boundary)
    patch.setitem(TRANSITIONS, (PENDING, Asked.LISTEN), (Do.SERVE, PENDING))


def a_second_upgrade_accepted(patch: Patch) -> None:
    patch.setitem(TRANSITIONS, (PENDING, Asked.UPGRADE_BELOW), (Do.OFFER, PENDING))


def a_live_socket_robbed(patch: Patch) -> None:
    real = Session._ask

    def ask(self: Session, asked: Asked, verdict: Verdict | None, now: float) -> Do:
        if self.door.state is BOUND:
            verdict = Verdict(self.door.generation, alive=False)
        return real(self, asked, verdict, now)

    patch.setattr(Session, "_ask", ask)


def the_cursor_moved_before_delivery(patch: Patch) -> None:
    real = Incoming.event

    def event(self: Incoming, block: Any, bridging: bool) -> Any:
        self.cursor = id = real(self, block, bridging)
        return id

    patch.setattr(Incoming, "event", event)


def the_ack_of_one_stream_evicts_anothers_event(patch: Patch) -> None:
    def acked(self: Outbox, mark: Any) -> bool:
        return max(self.acks.values(), default=0) >= mark.last

    patch.setattr(Outbox, "_acked", acked)


def the_replay_scanned_before_the_connection_listens(patch: Patch) -> None:
    real, connect = deliveries.poll, Session._connect
    scanned: dict[tuple[int, int], int] = {}

    def connecting(self: Session, delivery: Delivery) -> Serving:
        scanned[delivery.connection, delivery.position] = self.outbox.committed
        return connect(self, delivery)

    def poll(session: Session, delivery: Delivery, now: float) -> Any:
        opened, began = delivery.opened, delivery.position
        step = real(session, delivery, now)
        if isinstance(step, Deliver) and not opened and delivery.medium is Medium.EVENTS:
            upto = scanned.get((delivery.connection, began), step.upto)
            if upto < step.upto:
                delivery.position = step.upto  # live events start here; the replay ended there
                return Deliver(step.control, began, upto) if upto > began else Deliver(step.control, 0, 0)
        return step

    patch.setattr(Session, "_connect", connecting)
    patch.setattr("gapless.protocol.session.poll", poll)


ONE = Scenario("one step", before=1, emits=1, faults=1, prompt=True)
TWO = Scenario("two steps", client={"steps": 2}, emits=1, faults=1, prompt=True)
EVICTING = Scenario(
    "evicting",
    limits=Limits(retain_events=2),
    emits=4,
    faults=1,
    prompt=True,
    ends=frozenset({"cursor-evicted"}),
)
BOUNDARY = Scenario(
    "the boundary",
    client={"steps": 2},
    emits=1,
    siblings=("resume", "negotiate from the start"),
    ends=frozenset({"non-resumable-boundary", "session-superseded"}),
    prompt=True,
)
SIBLING = Scenario(
    "a sibling", emits=1, siblings=("resume",), ends=frozenset({"websocket-bound"}), prompt=True
)
FORGED = Scenario(
    "a forger",
    before=1,
    emits=0,
    siblings=("resume at a forged cursor",),
    ends=frozenset({"websocket-bound"}),
    prompt=True,
)
READING = Scenario("reading", client={"policy": "never"}, before=3, emits=0, faults=1, prompt=True)
SLOW = Scenario("slow", client={"policy": "never"}, before=1, emits=2, faults=1, prompt=False)
STREAMS = Scenario("streams", view=View.STREAM, limits=Limits(retain_events=4), emits=2, asks=1, faults=1)

MUTANTS: list[tuple[Callable[[Patch], None], Scenario]] = [
    (resume_from_the_last_ack_without_the_gap, ONE),
    (success_after_eviction, EVICTING),
    (a_server_position_accepted_as_cursor, FORGED),
    (no_echo, ONE),
    (a_stale_echo, ONE),
    (frames_before_the_ack, ONE),
    (an_idle_stream_at_the_boundary, BOUNDARY),
    (a_second_upgrade_accepted, BOUNDARY),
    (a_live_socket_robbed, SIBLING),
    (the_cursor_moved_before_delivery, READING),
    (the_ack_of_one_stream_evicts_anothers_event, STREAMS),
    (the_replay_scanned_before_the_connection_listens, SLOW),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "scenario"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_each_known_fault_is_found(
    mutant: Callable[[Patch], None], scenario: Scenario, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Found) as found:
        explore(scenario)
    assert "more than" not in str(found.value)
