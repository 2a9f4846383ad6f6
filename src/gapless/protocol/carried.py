"""The MCP server that a session carries, as its machine knows it (N1–N3).

Which incarnation of it runs, which messages wait for it, and what a fresh one has to be told before
it can go on for the last: the handshake, the log level, the subscriptions. What was told is recorded
as the numbers of inbox messages; the messages themselves are in the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec

from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, peek
from gapless.protocol.marks import UNMARKED, Mark

__all__ = [
    "HANDSHAKES",
    "LISTEN",
    "SUBSCRIBE",
    "Carried",
    "Phase",
    "Waiting",
    "acknowledges",
    "list_changes",
    "replayed",
    "said_in",
    "subscribed_changes",
]

LISTEN: Final = "subscriptions/listen"
SUBSCRIBE: Final = "resources/subscribe"
HANDSHAKES: Final = ("initialize", "server/discover")
"""Requests whose results tell a client what its server is."""

_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
_TOLD_BYTES: Final = 16
_TO: Final = "subscribe "
_LISTS: Final = ("tools", "prompts", "resources")
_NONE: Final[frozenset[RequestId]] = frozenset()
"""One for all: each empty one would take 216 bytes."""


class Phase(Enum):
    """What a session's backend is about."""

    RUNNING = "running"
    """It takes messages; one is started with the first, if none was."""
    DOWN = "down"
    """It is gone, and no other has begun: messages wait."""
    REPLAYING = "replaying"
    """A fresh one is being told what the last one knew: messages wait."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An accepted message, on its way to the backend."""

    number: int
    data: bytes
    envelope: Envelope


class _Server(msgspec.Struct):
    version: Any = None


class _Handshake(msgspec.Struct):
    protocolVersion: Any = None
    capabilities: dict[str, Any] = {}
    serverInfo: _Server | None = None


class _Answer(msgspec.Struct):
    result: _Handshake | None = None


class _Params(msgspec.Struct):
    uri: str = ""
    notifications: dict[str, Any] = {}
    meta: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="_meta")


class _Asked(msgspec.Struct):
    params: _Params = msgspec.field(default_factory=_Params)


_answer: Final = msgspec.json.Decoder(_Answer)
_asked: Final = msgspec.json.Decoder(_Asked)


class Carried:
    """One session's backend.

    Attributes:
        incarnation: how many there have been, this one included.
        told: a digest of what the client was told in each handshake; `lists` are those it declared.
        orders: what a fresh incarnation is to be told, by what it is about: numbers of inbox messages.
        waiting: accepted messages that no backend was handed yet.
        untaken: numbers of requests that were dispatched, that no backend has, and that wait again
            once a fresh one begins.
        handing: whether some are being handed over this moment.
        answered: whether this incarnation has answered a client's request.
        futile: how many in a row have not.
        news: what the client is told once all is replayed.
        replaying: what is still to be replayed, in order; `awaited` is what an answer is awaited to.
        unacknowledged: replayed subscriptions whose acknowledgement the client has had before.
    """

    __slots__ = (
        "answered",
        "awaited",
        "futile",
        "handing",
        "incarnation",
        "lists",
        "news",
        "orders",
        "phase",
        "replaying",
        "told",
        "unacknowledged",
        "untaken",
        "waiting",
    )

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.incarnation = 1
        self.told: dict[str, bytes] = {}
        self.lists: tuple[str, ...] = ()
        self.news: tuple[bytes, ...] = ()
        self.orders: dict[str, int] = {}
        self.waiting: list[Waiting] = []
        self.untaken: tuple[int, ...] = ()
        self.handing = False
        self.answered = False
        self.futile = 0
        self.replaying: list[Waiting] = []
        self.awaited: Waiting | None = None
        self.unacknowledged = _NONE

    @property
    def mark(self) -> Mark:
        """What this incarnation's own IDs bear; nothing, where none went before it (N3)."""
        return Mark(f"b{self.incarnation}.") if self.incarnation > 1 else UNMARKED

    @property
    def subscriptions(self) -> int:
        """How many resources the client is subscribed to, as far as backends were told."""
        return sum(about.startswith(_TO) for about in self.orders)

    def note(self, number: int, data: bytes, envelope: Envelope) -> None:
        """Note what a client's message would have to be to a fresh incarnation."""
        match envelope.method:
            case "notifications/initialized" | "logging/setLevel" as method:
                self.orders[method] = number
            case name if name == SUBSCRIBE:
                self.orders[f"{_TO}{_uri(data)}"] = number
            case "resources/unsubscribe":
                self.orders.pop(f"{_TO}{_uri(data)}", None)
            case _:
                pass

    def tell(self, method: str, number: int, data: bytes) -> None:
        """The client is told, in answer to the handshake that is message `number`, what its server is."""
        said = said_in(data)
        if said is not None:
            self.orders[method] = number
            self.told[method], self.lists = said

    def copy(self) -> Carried:
        """An independent copy."""
        other = Carried()
        for name in Carried.__slots__:
            setattr(other, name, getattr(self, name))
        other.orders, other.told = dict(self.orders), dict(self.told)
        other.waiting, other.replaying = self.waiting.copy(), self.replaying.copy()
        return other


def said_in(data: bytes) -> tuple[bytes, tuple[str, ...]] | None:
    """A digest of the versions and capabilities in a handshake's answer, and the lists declared (N2).

    `None`: it is an error, or says nothing of the kind.
    """
    try:
        result = _answer.decode(data).result
    except (msgspec.DecodeError, RecursionError):
        return None
    if result is None:
        return None
    version = None if result.serverInfo is None else result.serverInfo.version
    said = msgspec.json.encode((result.protocolVersion, version, result.capabilities), order="sorted")
    lists = tuple(name for name in _LISTS if name in result.capabilities)
    return hashlib.sha256(said).digest()[:_TOLD_BYTES], lists


def list_changes(lists: Iterable[str]) -> list[bytes]:
    """What tells a client to look at its server's lists again (N2)."""
    return [b'{"jsonrpc":"2.0","method":"notifications/%s/list_changed"}' % name.encode() for name in lists]


def subscribed_changes(listen: Waiting) -> list[bytes]:
    """The same for a subscription, to those lists that it asks for."""
    wanted = _asked.decode(listen.data).params.notifications
    meta = {_SUBSCRIPTION: listen.envelope.id}
    return [
        msgspec.json.encode(
            {"jsonrpc": "2.0", "method": f"notifications/{name}/list_changed", "params": {"_meta": meta}}
        )
        for name in _LISTS
        if wanted.get(f"{name}ListChanged") is True
    ]


def acknowledges(data: bytes, envelope: Envelope) -> RequestId | None:
    """The subscription that a message acknowledges, if that is what it does."""
    if envelope.method != "notifications/subscriptions/acknowledged":
        return None
    try:
        return _asked.decode(data).params.meta.get(_SUBSCRIPTION)
    except (msgspec.DecodeError, RecursionError):
        return None


def replayed(order: Waiting, taken: Iterable[RequestId]) -> Waiting:
    """A standing order as a fresh incarnation gets it: under an ID that is nobody's.

    Subscriptions that stay open keep theirs, by which their news are known.
    """
    if order.envelope.kind is not Kind.REQUEST or order.envelope.method == LISTEN:
        return order
    id = f"replay-{order.number}"
    while id in taken:
        id += "'"
    fields = msgspec.json.decode(order.data, type=dict[str, msgspec.Raw])
    fields["id"] = msgspec.Raw(msgspec.json.encode(id))
    data = msgspec.json.encode(fields)
    return Waiting(order.number, data, peek(data))


def _uri(data: bytes) -> str:
    try:
        return _asked.decode(data).params.uri
    except (msgspec.DecodeError, RecursionError):
        return ""
