"""What a backend emits: a run of messages is as each of them by itself."""

from __future__ import annotations

import pytest

from gapless.protocol.cursor import Link
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import Emitted, Lost, Message, Revive
from gapless.protocol.jsonrpc import peek
from gapless.protocol.session import Commit, Session, View
from gapless.protocol.settings import Limits

LINK0 = Link(bytes(8))
RUN = tuple(b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":%d}}' % n for n in range(9))
ASKS = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{}}'


def machine(view: View, *, again: bool) -> Session:
    """One with a request in flight, of the first incarnation or the second, and few events to a mark."""
    session = Session(view, LINK0, Limits(retain_events=256), "fsync", 0.0)
    answer_on = ConnectionId(1)
    session.handle(Message(ASKS, b"d", peek(ASKS), number=1, process="p", answer_on=answer_on), 0.0)
    if again:
        session.carried.answered = True
        session.handle(Lost("it crashed"), 0.0)
        session.handle(Revive(()), 0.0)
        session.handle(Message(ASKS, b"d", peek(ASKS), number=2, process="p", answer_on=answer_on), 0.0)
    session.confirm(session.take())
    return session


def written(session: Session) -> tuple[Commit, object]:
    """What the log gets, and what the machine knows of it."""
    commit = session.take()
    session.confirm(commit)
    outbox = session.outbox
    stored = outbox.head, outbox.link, outbox.evict(session.limits, 1e9), outbox.evicted
    return commit, (stored, [session.streams.last(stream) for stream in range(3)])


@pytest.mark.rule("L1", "L5", "M1")
@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("related", [None, 7])
def test_a_run_is_as_its_messages_one_by_one(view: View, again: bool, related: int | None) -> None:
    together, apart = machine(view, again=again), machine(view, again=again)
    incarnation = together.carried.incarnation
    assert together.handle(Emitted(RUN[0], peek(RUN[0]), related, incarnation, RUN[1:]), 1.0) == []
    for line in RUN:
        assert apart.handle(Emitted(line, peek(line), related, incarnation), 1.0) == []
    commit, known = written(together)
    assert (commit, known) == written(apart)
    assert [line for line in commit.segment.data.split(b"\n") if line.startswith(b"data: ")] == [
        b"data: " + line for line in RUN
    ]


def test_a_run_of_a_dead_incarnation_is_not_heard() -> None:
    session = machine(View.SESSION, again=True)
    session.handle(Emitted(RUN[0], peek(RUN[0]), None, 1, RUN[1:]), 1.0)
    assert session.take().segment.data == b""
