"""How what crosses the wire reads in a scenario: cursors as numbers, blocks as a few words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gapless.errors import MalformedError
from gapless.protocol.block import Block
from gapless.protocol.cursor import EventId, Link, parse_event_id
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.refusal import Refusal

__all__ = ["LINK0", "Words"]

_EVENT_ID: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9a-f]{16}")
LINK0: Final = Link(bytes(range(8)))


class Words:
    """Knows every event ID of the log, and so what a cursor is worth.

    A cursor reads as its number where its link is that number's own, as `13~10` where it is number 13
    with the link of event 10, and in quotes where it is no event ID at all.
    """

    def __init__(self) -> None:
        self.ids = [EventId(0, 0, LINK0)]

    def cursor(self, text: str | EventId) -> str:
        """A cursor as it reads."""
        try:
            id = parse_event_id(str(text))
        except MalformedError:
            return f'"{text}"'
        if id.seq < len(self.ids) and self.ids[id.seq] == id:
            return str(id.seq)
        return f"{id.seq}~{next(known.seq for known in self.ids if known.link == id.link)}"

    def read_cursor(self, text: str) -> str:
        """A cursor as it is sent, from how it reads.

        Raises:
            ValueError: it reads like none.
        """
        if len(text) > 1 and text[0] == text[-1] == '"':
            return text[1:-1]
        number, _, other = text.partition("~")
        seq = int(number)
        link = int(other or number)
        if not 0 <= link < len(self.ids):
            raise ValueError(f"there is no event {link} yet")
        return str(EventId(seq, 0, self.ids[link].link))

    def text(self, text: str) -> str:
        """A text in which event IDs read as cursors."""
        return _EVENT_ID.sub(lambda match: self.cursor(match[0]), text)

    def blocks(self, blocks: Iterable[Block]) -> str:
        """The blocks of one write, a run of plain events taken together."""
        out: list[str] = []
        run: list[int] = []
        for block in blocks:
            text = self._block(block)
            if text is not None:
                out += _run(run)
                run = []
                out.append(text)
            else:
                assert block.id is not None
                run.append(parse_event_id(block.id).seq)
        return ", ".join(out + _run(run)) or "keep-alive"

    def frame(self, blocks: Iterable[Block]) -> str:
        """The blocks of a frame from the client."""
        return ", ".join(
            f"message {block.id}" if block.event == "message" else self._control(block) for block in blocks
        )

    def name(self, block: Block) -> str:
        """What `lose` calls a block: `event 5`, or its type."""
        return block.event if not block.id else f"event {self.cursor(block.id)}"

    def _block(self, block: Block) -> str | None:
        """One block; `None` for an event that is a notification like any other."""
        if block.id is None:
            return self._control(block)
        if not block.data:
            return f"primed at {self.cursor(block.id)}"
        seq = self.cursor(block.id)
        if block.event != "message":
            return f"event {seq} {block.event}{_terminal(block)}"
        envelope = peek(block.data)
        if envelope.method == "notifications/cancelled":
            return f"event {seq} withdraws question {envelope.target}"
        method = envelope.method or ""
        if method.endswith("/list_changed"):
            return f"event {seq} {method.removeprefix('notifications/')}"
        if envelope.kind is Kind.NOTIFICATION:
            return None
        if envelope.kind is Kind.REQUEST:
            return f"event {seq} question {envelope.id}"
        error = _read(block).get("error")
        told = "result" if error is None else error["data"]["reason"]
        return f"event {seq} {told} of {envelope.id}"

    def _control(self, block: Block) -> str:
        body = _read(block)
        match block.event:
            case "message":
                assert block.retry is not None
                return f"retry: {block.retry / 1000:g} s"
            case "resume-cursor":
                origin = self.cursor(body["from"])
                told = f"resume-cursor cursor={body['cursor']} from={origin} received={body['received']}"
                return f"{told} generation={body['generation']}"
            case "received":
                return f"received {body['received']}" + (" resend" if body.get("resend") else "")
            case "session-superseded":
                return f"session-superseded{_terminal(block)} (control)"
            case "cursor-ack":
                return f"cursor-ack {self.cursor(body['cursor'])}"
            case other:
                return other

    def refusal(self, refusal: Refusal) -> str:
        """A refusal: status, reason, and where it says the server is."""
        told = f"{refusal.row.status} {refusal.reason.value}"
        if refusal.committed is not None:
            told += f" resume-cursor={refusal.committed} floor={refusal.floor}"
        return f"{told} action={refusal.row.action.value}"


def _run(numbers: list[int]) -> list[str]:
    if not numbers:
        return []
    first, last = numbers[0], numbers[-1]
    return [f"event {first}" if first == last else f"events {first}–{last}"]


def _terminal(block: Block) -> str:
    body = _read(block)
    if block.event == "upgrade-accepted":
        return f" negotiation={body['negotiation']} ticket={body['ticket'] or 'none'}"
    return f" reason={body['reason']}"


def _read(block: Block) -> dict[str, Any]:
    return msgspec.json.decode(block.data or b"{}")
