"""The simulation bites: each known way to break a promise, built into the real product, is found by it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gapless.client.transport import Connection
from gapless.log import database
from gapless.log.base import Write
from gapless.protocol.carried import Carried
from gapless.protocol.cursor import EventId
from gapless.protocol.inbox import Inbox, Verdict
from gapless.protocol.incoming import Incoming
from gapless.protocol.inputs import Effect, Input
from gapless.protocol.marks import Mark
from gapless.protocol.session import Session
from gapless.server import live as lives
from gapless.server.live import Live
from tests.simulation import node as nodes
from tests.simulation.ledger import RecordedLog
from tests.simulation.plan import SHORT, Plan
from tests.simulation.world import Failure, simulate

Patch = pytest.MonkeyPatch


def told_before_it_is_durable(patch: Patch) -> None:
    async def put(self: Live, input: Input) -> list[Effect]:
        effects = self.offer(input)
        self.machine.outbox.confirm(self.machine.outbox.head)
        self.machine.inbox.confirm(self.machine.inbox.received, self.machine.inbox.process)
        return effects

    patch.setattr(Live, "put", put)


def a_commit_without_a_sync(patch: Patch) -> None:
    class Hasty(RecordedLog):
        def __init__(self, path: str, **options: Any) -> None:
            super().__init__(path, synchronous="off", **options)

    patch.setattr(nodes, "RecordedLog", Hasty)


def a_fence_that_nobody_looks_at(patch: Patch) -> None:
    real = database.sql

    def sql(name: str) -> str:
        return real(name).replace("AND fence <= new.fence", "").replace("AND committed = new.expect", "")

    patch.setattr(database, "sql", sql)


def handed_over_before_it_is_durable(patch: Patch) -> None:
    async def may_hand_over(self: Live, version: int) -> bool:
        return True

    patch.setattr(Live, "may_hand_over", may_hand_over)


def not_settled_at_a_takeover(patch: Patch) -> None:
    patch.setattr(Session, "settle_unknown", lambda *_: None)


def handed_over_again_after_a_restart(patch: Patch) -> None:
    real = lives.as_write

    def as_write(*args: Any) -> Write:
        return structs.replace(real(*args), dispatched=None)

    patch.setattr(lives, "as_write", as_write)


def a_cursor_ahead_of_the_application(patch: Patch) -> None:
    def state(self: Incoming) -> EventId:
        assert self.anchor is not None
        self.stated = self.anchor
        return self.anchor

    patch.setattr(Incoming, "state", state)


def a_cursor_stated_before_it_is_saved(patch: Patch) -> None:
    real = Connection._save
    patch.setattr(Connection, "_save", lambda self, stating: real(self, False))


def a_log_without_its_recovery(patch: Patch) -> None:
    real = database._connect

    def connect(path: str, *rest: Any) -> Any:
        if os.path.exists(path + "-wal") and not os.path.exists(path + "-shm"):
            os.unlink(path + "-wal")
        return real(path, *rest)

    patch.setattr(database, "_connect", connect)


def a_repeat_taken_for_news(patch: Patch) -> None:
    real = Inbox.judge

    def judge(self: Inbox, process: str, number: int, same: bool) -> Verdict:
        found = real(self, process, number, same)
        return Verdict.ACCEPT if found is Verdict.REPEAT else found

    patch.setattr(Inbox, "judge", judge)


def questions_without_a_mark(patch: Patch) -> None:
    patch.setattr(Carried, "mark", property(lambda self: Mark("")))


def _as_it_is(plan: Plan) -> Plan:
    return plan


def _standing_still(plan: Plan) -> Plan:
    limits = replace(plan.limits, lease=0.5)
    return replace(plan, nodes=2, limits=limits, faults=("stall",), every=0.3, rough=0.3, lasting=25.0)


def _broken_off(plan: Plan) -> Plan:
    return replace(plan, faults=("reset", "half"), every=0.5)


def _asked_anew(plan: Plan) -> Plan:
    persons = tuple(replace(person, calls=tuple(map(_curious, person.calls))) for person in plan.persons)
    limits = replace(plan.limits, on_backend_loss="restart")
    return replace(plan, persons=persons, limits=limits, faults=("backend",), every=0.3, lasting=12.0)


def _curious(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "asks": tuple(range(1, call["steps"] + 1)), "cancels": None}


MUTANTS: dict[Callable[[Patch], None], tuple[Callable[[Plan], Plan], str]] = {
    told_before_it_is_durable: (_as_it_is, r"§11\.4|L6: a client was told"),
    a_commit_without_a_sync: (_as_it_is, r"L2: (of )?session|disk image is malformed"),
    a_fence_that_nobody_looks_at: (_standing_still, r"N1: .* written under|§11\.[56]|L2: of session"),
    handed_over_before_it_is_durable: (_as_it_is, r"N1: call .* its request is not durable"),
    not_settled_at_a_takeover: (_as_it_is, r"§11\.[56]"),
    handed_over_again_after_a_restart: (_as_it_is, r"§11\.6: call .* twice"),
    a_cursor_ahead_of_the_application: (_as_it_is, r"C4: .* states"),
    a_cursor_stated_before_it_is_saved: (_as_it_is, r"C4: .* before it is on disk"),
    a_log_without_its_recovery: (_as_it_is, r"L2: (of )?session"),
    a_repeat_taken_for_news: (_broken_off, r"§11\.6: .* twice|message-conflict|an answer too many"),
    questions_without_a_mark: (_asked_anew, r"N3: question"),
}
"""Each with the plans that it shows in, and what it is found by."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    plan, sign = MUTANTS[mutant]
    for seed in range(SHORT):
        root = tmp_path / str(seed)
        root.mkdir()
        try:
            simulate(plan(Plan.of(seed)), root)
        except Failure as failure:
            found = str(failure)
            print(f"\n{mutant.__name__}: {found.splitlines()[0]}")
            assert re.search(sign, found)
            return
    pytest.fail("it is not found")
