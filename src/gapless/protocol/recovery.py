"""What becomes of a session whose backend is gone (N1–N3).

Nothing that an MCP server has taken is handed over again: what was open is answered, out loud, and
what was not taken yet waits for a fresh one. That is told what the last one knew, without
anybody seeing its answers, and then goes on in its place, unless it says something else of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from gapless.protocol.carried import (
    HANDSHAKES,
    LISTEN,
    Phase,
    Waiting,
    acknowledges,
    list_changes,
    replayed,
    said_in,
    subscribed_changes,
)
from gapless.protocol.inputs import Dispatch, Effect, Emitted, Lost, Revive
from gapless.protocol.jsonrpc import Envelope, Kind, peek
from gapless.protocol.marks import from_backend, to_backend
from gapless.protocol.refusal import Reason

if TYPE_CHECKING:
    from gapless.protocol.session import Session

__all__ = ["FUTILE", "hand_over", "lost", "revive", "sift"]

FUTILE: Final = 3
"""Incarnations in a row that may end without having answered a client's request."""
_BATCH: Final = 64
"""Messages that are dispatched in one commit at most, where several wait."""


def lost(session: Session, input: Lost, now: float) -> list[Effect]:
    """The backend is gone: what it was handed is settled, what it asked is withdrawn (N2, N3)."""
    if session.reason is not None:
        return []
    carried, inbox = session.carried, session.inbox
    over = session.limits.on_backend_loss == "supersede"
    if not input.taken_over:
        unheard = carried.incarnation == 1 and not carried.answered  # it will not do better the next time
        carried.futile = 0 if carried.answered else carried.futile + 1
        over = over or unheard or carried.futile > FUTILE
    if over:
        session.terminate(Reason.BACKEND_LOST, Reason.BACKEND_LOST.value, input.message, now)
        return []
    for id in list(inbox.asked):
        params = {"requestId": id, "reason": "the MCP server was restarted"}
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        data = msgspec.json.encode(cancelled)
        session.speak(data, peek(data), None, now)
    again = {message.number for message in carried.waiting}
    dispatched = [request for request in inbox.open.values() if request.number <= session.dispatched]
    for request in dispatched:
        if request.method == LISTEN or request.number in again:
            continue
        if request.id in input.untaken:
            carried.untaken += (request.number,)
        else:
            session.settle_unknown(request, input.message, now)
    if session.dispatched:
        carried.incarnation += 1  # an earlier one may have made IDs that are still about
    carried.phase, carried.handing, carried.answered = Phase.DOWN, False, False
    carried.replaying.clear()
    carried.awaited = None
    session.touch()
    return []


def revive(session: Session, input: Revive, now: float) -> list[Effect]:
    """A fresh backend begins: with what the last one was told, if it was told anything."""
    carried = session.carried
    if session.reason is not None or carried.phase is not Phase.DOWN:
        return []
    carried.phase = Phase.REPLAYING
    carried.replaying.extend(input.orders)
    carried.waiting[:0] = input.untaken
    carried.untaken = ()
    carried.news = tuple(list_changes(carried.lists)) if "initialize" in carried.told else ()
    return _replay(session, now)


def _replay(session: Session, now: float) -> list[Effect]:
    """Replay up to the next request, whose answer decides; after the last, go on with what waits."""
    carried = session.carried
    effects: list[Effect] = []
    while carried.replaying:
        order = replayed(carried.replaying.pop(0), session.inbox.open)
        effects.append(Dispatch(0, order.data, order.envelope, carried.incarnation))
        if order.envelope.method == LISTEN and order.envelope.id is not None:
            carried.unacknowledged |= {order.envelope.id}
            carried.news += tuple(subscribed_changes(order))
        elif order.envelope.kind is Kind.REQUEST:
            carried.awaited = order
            return effects
    carried.phase = Phase.RUNNING
    for data in carried.news:
        session.append(0, "message", data, now)
    carried.news = ()
    return effects + hand_over(session)


def sift(session: Session, input: Emitted, now: float) -> Emitted | list[Effect]:
    """What a backend emitted, as the client is to see it; or, where it is not to, what follows from it."""
    carried, envelope = session.carried, input.envelope
    stale = input.incarnation and input.incarnation != carried.incarnation
    if stale or carried.phase is Phase.DOWN:
        return []
    awaited = carried.awaited
    if awaited is not None and envelope.kind is Kind.RESPONSE and envelope.id == awaited.envelope.id:
        return _answered(session, awaited, input.data, now)
    acknowledged = acknowledges(input.data, envelope) if carried.unacknowledged else None
    if acknowledged in carried.unacknowledged:
        carried.unacknowledged -= {acknowledged}
        return []
    mark = carried.mark
    if not mark or envelope.plain:
        return input
    data, envelope = from_backend(mark, input.data, envelope)
    return Emitted(data, envelope, input.related)


def _answered(session: Session, order: Waiting, data: bytes, now: float) -> list[Effect]:
    """A fresh backend has answered what was replayed to it: swallowed, unless it says something new."""
    carried = session.carried
    method = order.envelope.method
    carried.awaited = None
    if method in HANDSHAKES:
        said = said_in(data)
        if said is None or said[0] != carried.told.get(method):
            text = "after its restart the MCP server has another version, or other capabilities"
            session.terminate(Reason.BACKEND_LOST, Reason.BACKEND_LOST.value, text, now)
            return []
    return _replay(session, now)


def hand_over(session: Session) -> list[Effect]:
    """Dispatch what waits, if the backend takes messages; the log has their numbers before it does (N1)."""
    carried = session.carried
    if carried.phase is not Phase.RUNNING or carried.handing or session.reason is not None:
        return []
    effects: list[Effect] = []
    while carried.waiting and len(effects) < _BATCH:
        message = carried.waiting.pop(0)
        first = message.number > session.dispatched
        if first:
            session.note_dispatched(message.number)
        sent: tuple[bytes, Envelope] | None = to_backend(carried.mark, message.data, message.envelope)
        if sent is None:
            continue  # an answer to a question of an earlier incarnation: accepted, and dropped (N3)
        if first:
            carried.note(message.number, message.data, message.envelope)
        effects.append(Dispatch(message.number, *sent, carried.incarnation))
    carried.handing = bool(effects)
    return effects
