"""The client's stateful test bites: each of these faults, built into the real machine, is found by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from gapless.errors import GaplessError
from gapless.protocol.client import Client
from gapless.protocol.incoming import Event, Incoming
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.moves import Arrived, Effect
from gapless.protocol.sending import Sending
from tests.client.test_client_stateful import Following
from tests.fuzz.examples import SEARCH

Patch = pytest.MonkeyPatch


def a_cursor_moved_before_delivery(patch: Patch) -> None:
    real = Incoming.take

    def take(self: Incoming) -> Event | None:
        event = real(self)
        if event is not None:
            self.cursor = event.id
        return event

    patch.setattr(Incoming, "take", take)


def an_end_that_settles_nothing(patch: Patch) -> None:
    real = Client._end

    def end(self: Client, error: GaplessError | None, *, live: bool = True) -> list[Effect]:
        self.outgoing.waiting.clear()
        return real(self, error, live=live)

    patch.setattr(Client, "_end", end)


def a_gap_acknowledged_on_arrival(patch: Patch) -> None:
    real = Client._arrived

    def arrived(self: Client, input: Arrived, now: float) -> list[Effect]:
        effects = real(self, input, now)
        incoming = self.incoming
        anchor, gap = incoming.anchor, incoming.gap
        if gap is not None and incoming.primed and anchor is not None and anchor.seq >= gap:
            incoming.cursor = anchor
            effects += self._close_gap()
        return effects

    patch.setattr(Client, "_arrived", arrived)


def a_message_sent_before_received_is_told(patch: Patch) -> None:
    real = Sending.flush

    def flush(self: Sending, socket: int | None, connection: int) -> list[Effect]:
        self.told = self.told or 0
        return real(self, socket, connection)

    patch.setattr(Sending, "flush", flush)


def an_ack_that_waits_for_64_events(patch: Patch) -> None:
    real = Client._ack

    def ack(self: Client, now: float) -> list[Effect]:
        effects, self._ack_at = real(self, now), None
        return effects

    patch.setattr(Client, "_ack", ack)


def a_late_end_of_an_older_stream(patch: Patch) -> None:
    real = Client._dispatch

    def dispatch(self: Client, input: Any, now: float) -> list[Effect]:
        if type(input).__name__ == "StreamEnded":
            return self._stream_ended(now)
        return real(self, input, now)

    patch.setattr(Client, "_dispatch", dispatch)


def a_timer_that_is_forgotten(patch: Patch) -> None:
    real = Client._rest

    def rest(self: Client, *args: Any, **more: Any) -> list[Effect]:
        effects = real(self, *args, **more)
        self._wake = None
        return effects

    patch.setattr(Client, "_rest", rest)


def an_end_that_forgets_what_had_arrived(patch: Patch) -> None:
    real = Client._end

    def end(self: Client, error: GaplessError | None, *, live: bool = True) -> list[Effect]:
        self.incoming.clear()
        return real(self, error, live=live)

    patch.setattr(Client, "_end", end)


def a_connection_that_forgets_what_had_arrived(patch: Patch) -> None:
    real = Incoming.attach

    def attach(self: Incoming) -> None:
        self.clear()
        real(self)

    patch.setattr(Incoming, "attach", attach)


def a_question_after_the_end(patch: Patch) -> None:
    real = Client.wanted

    def wanted(self: Client, event: Event) -> bool:
        return real(self, event) or (event.event == "message" and peek(event.data).kind is Kind.REQUEST)

    patch.setattr(Client, "wanted", wanted)


MUTANTS = (
    a_cursor_moved_before_delivery,
    an_end_that_settles_nothing,
    a_gap_acknowledged_on_arrival,
    a_message_sent_before_received_is_told,
    an_ack_that_waits_for_64_events,
    a_late_end_of_an_older_stream,
    a_timer_that_is_forgotten,
    an_end_that_forgets_what_had_arrived,
    a_connection_that_forgets_what_had_arrived,
    a_question_after_the_end,
)


@pytest.mark.parametrize("break_it", MUTANTS)
def test_each_known_fault_is_found(break_it: Callable[[Patch], None], monkeypatch: Patch) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Following, settings=SEARCH)
