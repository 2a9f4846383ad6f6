"""What lies between the two machines of a scenario: requests, connections, and what is on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gapless.protocol.delivery import ConnectionId, Delivery
from tests.scenarios.words import Words

__all__ = ["Item", "Link", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request: whose, what, and what it states. `attempt` is the client's own number of it."""

    who: str
    kind: str
    attempt: int = 0
    cursor: str | None = None
    ticket: str | None = None
    nonce: str = ""
    messages: tuple[tuple[int, bytes], ...] = ()

    def called(self, name: str) -> str:
        """What `hold` and `lose` call something of this request: the client's go without saying."""
        return name if self.who == "client" else f"{self.who} {name}"

    def read(self, words: Words) -> str:
        """The request as it reads."""
        cursor = "" if self.cursor is None else words.cursor(self.cursor)
        match self.kind:
            case "events":
                return "GET events" + (f", Last-Event-ID: {cursor}" if cursor else "")
            case "handshake" if self.ticket is None:
                return f"GET events, Upgrade: websocket, Last-Event-ID: {cursor}"
            case "handshake":
                return f"GET events?ticket={self.ticket}&cursor={cursor}, Upgrade: websocket"
            case "upgrade":
                return f"POST upgrade cursor={cursor} negotiation={self.nonce}"
            case "ack":
                return f"POST ack cursor={cursor}"
            case "messages":
                return "POST messages " + " ".join(str(number) for number, _ in self.messages)
            case _:
                return "DELETE"


@dataclass(slots=True, eq=False)
class Link:
    """A connection that the server serves, for whoever made `request`.

    Attributes:
        serving, open: whether the server, and the client, still have their ends of it.
        half: what is sent on it, either way, gets nowhere.
        answered: its 200 or 101 has come, or is lost: what is written on it may come now.
        stalled: the server cannot write on it.
        until: when the server will look at it again by itself.
    """

    conn: ConnectionId
    request: Request
    delivery: Delivery
    socket: bool
    serving: bool = True
    open: bool = True
    half: bool = False
    answered: bool = False
    stalled: bool = False
    until: float = 0.0

    @property
    def kind(self) -> str:
        """What it is."""
        return "socket" if self.socket else "stream"

    @property
    def name(self) -> str:
        """What `hold` calls it."""
        return self.request.called(self.kind)


@dataclass(frozen=True, slots=True)
class Item:
    """Something on its way. `name` is what `hold` and `lose` call it; `link` is what it travels on."""

    name: str
    cross: Callable[[], None]
    lose: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    link: Link | None = None
