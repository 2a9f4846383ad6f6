"""What is sent on one connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.attack.target import Seat, Target

__all__ = ["Family", "Frames", "Volley"]


@dataclass(slots=True)
class Volley:
    """Bytes for a connection that speaks HTTP.

    Attributes:
        pieces: what is written, each with a turn of the loop after it.
        inputs: how many bad inputs there are in it.
        patient: leave it to the server to end the connection, if it is owed more than it got.
        seat: whose session it is about, if it is about one.
        plain: whether HTTP has nothing against any of it, so that every request is to be answered.
    """

    pieces: list[bytes]
    inputs: int = 1
    patient: bool = False
    seat: Seat | None = None
    plain: bool = False


@dataclass(slots=True)
class Frames:
    """A handshake, and bytes for the socket it may bring.

    Attributes:
        handshake: the request.
        data: what follows, once the socket is bound.
        inputs: how many bad inputs there are in it.
        seat: whose session it is.
    """

    handshake: bytes
    data: bytes
    inputs: int
    seat: Seat


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of bad input.

    Attributes:
        name: for the table.
        share: of all volleys, in thousandths.
        make: a volley of it.
    """

    name: str
    share: int
    make: Callable[[Random, Target], Volley | Frames]
