"""What the explored components share: canonical states, memoised steps, violations.

A component (the server, a client) is a real machine with what surrounds it. It is never changed once
it exists: a step copies it, lets the copy act, and looks the result up by its canonical form. Two
components that can only behave alike are therefore one object; a step taken once is never computed
again; and a world is a tuple of a few objects, cheap to make, to hash and to keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any

from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.client import Client
from gapless.protocol.delivery import Delivery
from gapless.protocol.outbox import Outbox
from gapless.protocol.session import Session

__all__ = ["END", "FIN", "OPEN", "Item", "Violation", "decode", "freeze", "item"]


class Violation(Exception):
    """Something that §11 of the protocol, or one of its rules, says never happens."""


_ATOMS = frozenset({int, str, bytes, bool, float, NoneType})

_SKIPPED: dict[type, frozenset[str]] = {
    # Fixed for a whole exploration.
    Session: frozenset({"limits", "view", "durability"}),
    # Fixed; for display only (`committed`); said by `phase` already.
    Client: frozenset({"limits", "policy", "retry", "committed", "error"}),
    # Counted, never decided by.
    Delivery: frozenset({"heard"}),
    Outbox: frozenset({"evicted_unacked"}),
}


@cache
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    skipped = _SKIPPED.get(kind, frozenset())
    return tuple(name for name in names if name not in skipped)


def freeze(value: Any) -> Hashable:
    """A value's canonical form, by reflection: a field that a machine gains is in it from the start."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, Enum | frozenset):
        return value
    if kind in (tuple, list, deque):
        return tuple([freeze(v) for v in value])
    if kind is dict:
        return tuple([(k, freeze(v)) for k, v in value.items()])
    if kind is set:
        return frozenset(value)
    if kind is bytearray:
        return bytes(value)
    names = _slots(kind)
    if not names:
        skipped = _SKIPPED.get(kind, frozenset())
        names = tuple([name for name in vars(value) if name not in skipped])
    return tuple([freeze(getattr(value, name)) for name in names])


class Item:
    """What travels on a connection: a block, or its beginning or end. One object for each, so that
    comparing two is comparing addresses."""

    __slots__ = ("block", "kind", "text", "value")

    def __init__(self, kind: str, value: Any, block: Block | None, text: str) -> None:
        self.kind = kind
        self.value = value
        self.block = block
        self.text = text

    def __repr__(self) -> str:
        return self.text


OPEN, END, FIN, BLOCK = "open", "end", "fin", "block"

_items: dict[Hashable, Item] = {}


def item(kind: str, value: Any = None) -> Item:
    """The one item of this kind and value: `OPEN` with the echo, `END` with a code, or `FIN`."""
    found = _items.get((kind, value))
    if found is None:
        found = _items[kind, value] = Item(kind, value, None, f"{kind} {value}" if value else kind)
    return found


def decode(data: bytes) -> tuple[Item, ...]:
    """The blocks that these bytes are, read by the real decoder; comments leave nothing."""
    out: list[Item] = []
    for block in BlockDecoder(1 << 20).feed(data):
        found = _items.get(block)
        if found is None:
            name = block.event if block.id is None or block.data == b"" else f"{block.event} {block.id}"
            if block.id is not None and not block.data:
                name = f"prime {block.id}"
            if name == "message" and block.retry is not None:
                name = "retry"
            detail = "" if block.id is not None or not block.data else " " + block.data.decode()
            found = _items[block] = Item(BLOCK, None, block, name + detail)
        out.append(found)
    return tuple(out)
