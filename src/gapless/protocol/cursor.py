"""Event IDs, cursors and the link chain (L5, C1–C3): grammar, parse, format, hash. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Final, NewType, cast

import msgspec

from gapless.errors import MalformedError

__all__ = [
    "LINK_BYTES",
    "MAX_SEQ",
    "START",
    "EventId",
    "Link",
    "Position",
    "Start",
    "id_after",
    "link_after",
    "links_after",
    "parse_cursor",
    "parse_event_id",
]

Link = NewType("Link", bytes)
"""Eight bytes that chain an event to all before it (L5)."""

LINK_BYTES: Final = 8
MAX_SEQ: Final = 2**63 - 1

_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_EVENT_ID = re.compile(rf"({_NUMBER})\.({_NUMBER})\.([0-9a-f]{{16}})", re.ASCII)


class EventId(msgspec.Struct, frozen=True):
    """`seq "." stream "." link` (C1): one event's place in its session, and the proof of it."""

    seq: int
    stream: int
    link: Link

    def __str__(self) -> str:
        return f"{self.seq}.{self.stream}.{self.link.hex()}"


class Start:
    """The bare cursor `0`: "from the start" (C1). One instance, `START`."""

    __slots__ = ()
    seq: Final = 0
    stream: Final = 0

    def __str__(self) -> str:
        return "0"

    def __repr__(self) -> str:
        return "START"


START: Final = Start()

Position = EventId | Start
"""What a client may state as its cursor."""


def parse_event_id(text: str) -> EventId:
    """Parse a full event ID.

    Raises:
        MalformedError: anything but C1's one form, numbers above 2⁶³−1 included.
    """
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        raise MalformedError(f"{text[:64]!r} is not an event ID (seq.stream.link)")
    seq, stream = int(match[1]), int(match[2])
    if seq > MAX_SEQ or stream > MAX_SEQ:
        raise MalformedError("an event ID's numbers end at 2^63-1")
    return EventId(seq, stream, Link(bytes.fromhex(match[3])))


def parse_cursor(text: str) -> Position:
    """Parse a cursor as a client states it: an event ID, or the bare `0` (C1).

    Raises:
        MalformedError: everything else, bare integers included: no endpoint takes a
            server position for a client's cursor (C2).
    """
    return START if text == "0" else parse_event_id(text)


def id_after(previous: EventId, stream: int, event: str, data: bytes) -> EventId:
    """The ID of the event that follows `previous` (C1, L5)."""
    link = _link_after(previous.link, _about(stream, event), data)
    return EventId(previous.seq + 1, stream, cast("Link", link))


def link_after(previous: Link, stream: int, event: str, data: bytes) -> Link:
    """The link of the event that follows `previous` (L5).

    It is the first 8 bytes of a SHA-256: of the link before it, its stream, its type and its data.
    """
    return cast("Link", _link_after(previous, _about(stream, event), data))


def links_after(previous: Link, stream: int, event: str, run: Iterable[bytes]) -> list[Link]:
    """The links of a run of events of one type and stream that follow `previous`, in turn (L5)."""
    about, link = _about(stream, event), cast("bytes", previous)
    return cast("list[Link]", [link := _link_after(link, about, data) for data in run])


def _link_after(previous: bytes, about: bytes, data: bytes) -> bytes:
    return sha256(previous + about + data).digest()[:LINK_BYTES]


@lru_cache(256)
def _about(stream: int, event: str) -> bytes:
    """What the links of all events of a type and stream have in common."""
    return b"%d\n%b\n" % (stream, event.encode())
