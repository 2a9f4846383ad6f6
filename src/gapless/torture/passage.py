"""One passage through the door, by hand, with everything checked that a client can see of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from gapless.protocol.block import Block
from gapless.torture.door import DoorSession, Frames, reason_of
from gapless.torture.reading import message_of, sequence_of
from gapless.torture.trial import Trial, Violation

__all__ = ["Passed", "Refused", "pass_door"]

_GATE: Final = 0.02
"""Seconds for which the ack is held back, to see whether frames above the cursor come nevertheless."""
_GAP_MOST: Final = 5.0


@dataclass(frozen=True, slots=True)
class Passed:
    """Through: the socket, and the cursor that the server echoed."""

    frames: Frames
    echo: int | None
    first_event: float
    """Seconds from the handshake until the first event."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not through: what the upgrade or the handshake was answered."""

    status: int
    reason: str


async def pass_door(
    session: DoorSession, trial: Trial, steps: Literal[1, 2], sent: Callable[[], int] = lambda: 0
) -> Passed | Refused:
    """Go through the door from one's own cursor; process the gap, hold the ack back a little, send it.

    Args:
        sent: the highest event that any other connection of the session has been sent.
    """
    ticket: str | None = None
    if steps == 2:
        status, body = await session.upgrade(session.cursor, secrets.token_urlsafe(6))
        if status != 200 or "ticket" not in body:
            return Refused(status, reason_of(body))
        ticket = str(body["ticket"])
    began, committed = trial.trace.now, max(session.seq, sent())
    knocked = await session.knock(session.cursor, ticket)
    if knocked.frames is None:
        return Refused(knocked.status, knocked.reason)
    frames = knocked.frames
    first = await frames.next()
    told = _echo_in(first)
    echo = knocked.echo if knocked.echo is not None else told
    if echo is None:
        trial.find(
            Violation.NO_ECHO, f"101 at cursor {session.seq}, without X-MCP-Resume-Cursor or a frame of it"
        )
    elif echo < committed:
        trial.find(Violation.STALE_ECHO, f"the 101 says {echo}, and event {committed} had been sent before")
    if first is not None and told is None:
        session.take(first)
    first_event = 0.0
    while echo is not None and session.seq < echo:
        block = await frames.next(_GAP_MOST)
        if block is None:
            trial.find(Violation.STUCK, f"the gap {session.seq + 1}–{echo} does not come")
            return Passed(frames, echo, first_event)
        if session.take(block):
            first_event = first_event or trial.trace.now - began
    if echo is not None:
        await _gate(session, trial, frames, echo)
    await frames.ack(session.cursor)
    return Passed(frames, echo, first_event)


async def _gate(session: DoorSession, trial: Trial, frames: Frames, echo: int) -> None:
    """Until the ack nothing may come above the cursor: if it does, either the gate or the cursor is wrong."""
    early: list[Block] = []
    until = trial.trace.now + _GATE
    while trial.trace.now < until and (block := await frames.next(_GATE)) is not None:
        if session.take(block) and (sequence_of(block.id) or 0) > echo:
            early.append(block)
    acceptance = next((block for block in early if block.event == "upgrade-accepted"), None)
    if acceptance is not None:
        number = sequence_of(acceptance.id)
        trial.find(Violation.STALE_ECHO, f"the 101 says {echo}, and the acceptance itself is event {number}")
    elif early:
        number = sequence_of(early[0].id)
        told = f"event {number} came above the echoed cursor {echo}, before its cursor-ack"
        trial.find(Violation.ABOVE_CURSOR, told)


def _echo_in(block: Block | None) -> int | None:
    """The cursor in a resume-cursor block."""
    if block is None or block.event != "resume-cursor":
        return None
    cursor = (message_of(block) or {}).get("cursor")
    return cursor if isinstance(cursor, int) else None
