"""What the explored components share: canonical states, memoised steps, violations.

A component (the server, a client) is a real machine with what surrounds it. It is never changed once
it exists: a step copies it, lets the copy act, and looks the result up by its canonical form. Two
components that can only behave alike are therefore one object; a step taken once is never computed
again; and a world is a tuple of a few objects, cheap to make, to hash and to keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, Final

from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.client import Client
from gapless.protocol.delivery import Delivery
from gapless.protocol.outbox import Outbox
from gapless.protocol.session import Session

__all__ = ["END", "FIN", "OPEN", "Item", "Violation", "blocks", "decode", "freeze", "item"]


class Violation(Exception):
    """Something that §11 of the protocol, or one of its rules, says never happens."""


_ATOMS: set[type] = {int, str, bytes, bool, float, NoneType, frozenset}
_SEQUENCES: Final = frozenset({tuple, list, deque})

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
def _fields(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """What reads all fields of a slotted type at once; `None` for a type without slots."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    skipped = _SKIPPED.get(kind, frozenset())
    names = [name for name in names if name not in skipped]
    if not names:
        return None
    return attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)


def freeze(value: Any) -> Hashable:
    """A value's canonical form, by reflection: a field that a machine gains is in it from the start."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return tuple([(k, v if type(v) in _ATOMS else freeze(v)) for k, v in value.items()])
    if kind is bytearray:
        return bytes(value)
    if kind is set:
        return frozenset(value)
    if kind not in _SEQUENCES:
        if isinstance(value, Enum):
            _ATOMS.add(kind)
            return value
        read = _fields(kind)
        if read is not None:
            value = read(value)
        else:
            skipped = _SKIPPED.get(kind, frozenset())
            value = [v for name, v in vars(value).items() if name not in skipped]
    return tuple([v if type(v) in _ATOMS else freeze(v) for v in value])


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


@cache
def blocks(data: bytes) -> tuple[Block, ...]:
    """The blocks that these bytes are, read by the real decoder."""
    return tuple(BlockDecoder(1 << 20).feed(data))


@cache
def decode(data: bytes) -> tuple[Item, ...]:
    """The same, as what travels; comments leave nothing."""
    out: list[Item] = []
    for block in blocks(data):
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
