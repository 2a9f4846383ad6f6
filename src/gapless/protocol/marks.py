"""Marks that keep IDs apart where an earlier incarnation could collide (N3).

Programs number their requests from 1, each run anew. The second and later client processes of a
session, and the second and later incarnations of its backend, have theirs marked on the way out
and unmarked on the way in. The first of each is marked by nothing and changed in nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from gapless.protocol.jsonrpc import Envelope, Kind, peek

__all__ = ["UNMARKED", "Mark", "from_backend", "to_backend"]

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Mark:
    """The mark of one incarnation; with an empty `text`, none."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __bool__(self) -> bool:
        return bool(self._text)

    def put_on(self, id: Any) -> Any:
        """An ID as it goes out. What is no ID stays what it is."""
        if not self._text or not isinstance(id, int | str) or isinstance(id, bool):
            return id
        return f"{self._text}{'i' if isinstance(id, int) else 's'}{id}"

    def take_off(self, id: Any) -> Any:
        """An ID as it was before it went out; one without this mark stays what it is."""
        if not self._text or not self.bears(id):
            return id
        kind, rest = id[len(self._text) : len(self._text) + 1], id[len(self._text) + 1 :]
        if kind == "i":
            return int(rest) if _INTEGER.fullmatch(rest) else id
        return rest

    def bears(self, id: Any) -> bool:
        """Whether an ID bears this mark, as all do where there is none."""
        return not self._text or (isinstance(id, str) and id.startswith(self._text))


UNMARKED: Final = Mark("")


def from_backend(mark: Mark, data: bytes, envelope: Envelope) -> tuple[bytes, Envelope]:
    """A backend's message with its own request's ID, or its own progress token, marked."""
    own = envelope.kind is Kind.REQUEST or envelope.method == "notifications/cancelled"
    if not mark or not own:
        return data, envelope
    fields = _fields.decode(data)
    _change(fields, "id", mark.put_on)
    if "params" in fields and bytes(fields["params"]).startswith(b"{"):
        params = _fields.decode(fields["params"])
        if envelope.kind is not Kind.REQUEST:
            _change(params, "requestId", mark.put_on)
        elif "_meta" in params and bytes(params["_meta"]).startswith(b"{"):
            meta = _fields.decode(params["_meta"])
            _change(meta, "progressToken", mark.put_on)
            params["_meta"] = msgspec.Raw(msgspec.json.encode(meta))
        fields["params"] = msgspec.Raw(msgspec.json.encode(params))
    return _encoded(fields)


def to_backend(mark: Mark, data: bytes, envelope: Envelope) -> tuple[bytes, Envelope] | None:
    """A client's answer, or its progress on a request, as its backend knows that.

    `None`: it speaks of a request that another incarnation made, and this one must not see it.
    """
    if envelope.kind is Kind.RESPONSE:
        spoken_of, at = envelope.id, "id"
    elif envelope.method == "notifications/progress":
        spoken_of, at = envelope.token, "progressToken"
    else:
        return data, envelope
    if not mark:
        return data, envelope
    if not mark.bears(spoken_of):
        return None
    fields = _fields.decode(data)
    if at == "id":
        _change(fields, "id", mark.take_off)
    else:
        params = _fields.decode(fields["params"])
        _change(params, at, mark.take_off)
        fields["params"] = msgspec.Raw(msgspec.json.encode(params))
    return _encoded(fields)


def _change(fields: dict[str, msgspec.Raw], name: str, change: Any) -> None:
    if name in fields:
        fields[name] = msgspec.Raw(msgspec.json.encode(change(msgspec.json.decode(fields[name]))))


def _encoded(fields: dict[str, msgspec.Raw]) -> tuple[bytes, Envelope]:
    data = msgspec.json.encode(fields)
    return data, peek(data)
