"""From bytes to a machine's input: one client message, whichever way it came."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from gapless.errors import MalformedError
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import Known, Message, Problem
from gapless.protocol.jsonrpc import one_line, peek, salvage
from gapless.protocol.refusal import Reason

__all__ = ["message_input", "message_number"]

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
_DIGEST_BYTES: Final = 16


def message_number(text: str | None) -> int | None:
    """A message's number: plain decimals from 1 to 2⁶³−1 (L6); `None` for anything else."""
    if text is None or _NUMBER.fullmatch(text) is None:
        return None
    number = int(text)
    return number if number < 2**63 else None


def message_input(
    data: bytes,
    limit: int,
    *,
    number: int | None = None,
    process: str | None = None,
    known: Known | None = None,
    connection: ConnectionId | None = None,
    answer_on: ConnectionId | None = None,
    primed: bool = True,
) -> Message:
    """Look at one message's JSON text: its digest, its envelope, or what is wrong with it (W4, W5, L6)."""
    envelope, problem, line = None, None, data
    if len(data) > limit:
        text = f"a message of {len(data)} bytes is above the limit of {limit}"
        problem = Problem(Reason.TOO_LARGE, text, salvage(data))
    elif data or number is None:
        try:
            line = one_line(data)
            envelope = peek(line)
        except MalformedError as error:
            problem = Problem(Reason.MALFORMED, str(error), salvage(data))
    return Message(
        line,
        hashlib.sha256(data).digest()[:_DIGEST_BYTES],
        envelope,
        number=number,
        process=process,
        known=known,
        problem=problem,
        connection=connection,
        answer_on=answer_on,
        primed=primed,
    )
