"""The contract of a durable log: what the rest of Gapless may ask of one, and may rely on.

A log keeps, for each session, an **outbox** (server→client events, numbered from 1,
contiguous, linked), an **inbox** (client→server messages, numbered from 1, contiguous) and
one **record** (the session's state, opaque bytes to the log).

The machine in `protocol/session.py` decides; a log only makes decisions durable, in order.
One decision, or as many as gathered while the previous commit ran, is one `Write`: events
already numbered, linked and in wire form (a *segment*), inbox entries, the new record. A
write is atomic: after it all of it is there, or, if it raised, none of it.

What every implementation promises:

* **Order** (L8). A write states the `committed` (last sequence number) it follows and the
  `fence` it writes under. If the log holds another `committed`, or a higher fence, nothing is
  written and `ConflictError` is raised. `commit` returns when the write is durable at the
  advertised class (L2); nothing of it can be read before.
* **Reading.** `read` returns whole blocks, byte for byte as written, in order, only committed
  ones, never one at or below the floor. It never returns more than it was asked for.
* **Floor** (L3). `Write.floor` evicts: afterwards everything at or below is gone, and its link
  is kept. The floor never falls. A read below the floor raises `BelowFloorError`.
* **Primary copy.** `load`, `read`, `runs`, `link` and `digest` see every commit that has returned.
* **Ownership** (N1). `join` registers a process as an *owner*; `create` and `acquire` make a session
  its own. `acquire` raises the session's fence, and of several that try at once one succeeds; a
  write under an older fence raises `ConflictError`. An owner shows life by `beat`; how long it may
  be silent is for those who watch it to judge, each by its own clock: a log compares no clocks.

Several sessions may commit at once; for one session the caller has one commit under way at a
time. Implementations that talk to storage group the commits of many sessions into one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import msgspec

from gapless.errors import LogError
from gapless.protocol.cursor import Link
from gapless.protocol.outbox import Grain, Run

__all__ = [
    "BelowFloorError",
    "Digest",
    "Durability",
    "Entry",
    "Grain",
    "Log",
    "Owner",
    "OwnerId",
    "Run",
    "SessionKey",
    "Stored",
    "Write",
]

SessionKey = NewType("SessionKey", bytes)
"""The SHA-256 of a session's token: tokens themselves are never stored (§9)."""

Digest = NewType("Digest", bytes)
"""The first 16 bytes of the SHA-256 of an inbox message's JSON text (L6)."""

OwnerId = NewType("OwnerId", int)
"""A process that serves a log's sessions; a number is never given twice."""


class Durability(StrEnum):
    """What a returned commit survives (L2); advertised, never overstated."""

    MEMORY = "memory"
    """Nothing but the connection: it is gone with the process."""
    OS = "os"
    """The process's death; not the machine's."""
    FSYNC = "fsync"
    """The machine's death, if its disk keeps what it acknowledged."""
    REPLICATED = "replicated"
    """The loss of one node."""


class BelowFloorError(LogError):
    """A read from a position below the floor: those events are evicted (L3)."""

    code = "cursor-evicted"


class Entry(msgspec.Struct, frozen=True):
    """One accepted client→server message: its number, its digest, its JSON text (empty: a placeholder)."""

    number: int
    digest: Digest
    data: bytes


class Write(msgspec.Struct, frozen=True):
    """One atomic step of a session's log.

    Attributes:
        expect: the `committed` this follows; the segment starts at `expect + 1`.
        segment: the new events' blocks, concatenated; empty if there are none.
        last: the last event's number; `expect` if the segment is empty.
        link: the link at `last`.
        entries: new inbox messages, contiguous.
        dispatched: the highest inbox number that may have been handed to the backend, if it moved (N1).
        record: the new record, if it changed.
        floor: evict everything at or below this number; `floor_link` is the link there.
        fence: the writer's fencing number.
    """

    expect: int
    segment: bytes
    last: int
    link: Link
    entries: tuple[Entry, ...] = ()
    dispatched: int | None = None
    record: bytes | None = None
    floor: int | None = None
    floor_link: Link | None = None
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that serves sessions of this log (N1).

    Attributes:
        address: where other processes reach it; empty if they cannot.
        beat: rises with every sign of life.
        losses: rises with every session that another process takes from it.
    """

    id: OwnerId
    address: str
    beat: int
    losses: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a log knows of one session. `updated` is Unix time, in seconds, of the last write.

    `owner` is who has it, or had it and is gone: whether it is there still `owners` tells.
    """

    key: SessionKey
    record: bytes
    committed: int
    link: Link
    floor: int
    floor_link: Link
    received: int
    dispatched: int
    fence: int
    created: float
    updated: float
    owner: OwnerId | None = None


class Log(ABC):
    """A durable log of many sessions. Coroutines belong to the loop that called `start`."""

    durability: Durability
    place: str | None = None
    """A path in whose neighbourhood the processes on this log may meet; `None`: there is but one process."""

    @abstractmethod
    async def start(self) -> None:
        """Open the store, migrating an older schema.

        Raises:
            StorageError: it cannot be opened; SchemaError: it is newer or not ours.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish the commits under way and release the store. Idempotent."""

    @abstractmethod
    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        """Make an empty session with `link(0) = link`, owned by `owner`; durable on return.

        Raises:
            ConflictError: the key exists. StorageError: nothing was written.
        """

    @abstractmethod
    async def load(self, key: SessionKey) -> Stored | None:
        """What is durable of a session, `None` if there is none."""

    @abstractmethod
    async def join(self, address: str) -> OwnerId:
        """Register an owner; durable on return."""

    @abstractmethod
    async def beat(self, owner: OwnerId) -> int:
        """A sign of life; returns the owner's `losses` so far.

        Raises:
            ConflictError: it is registered no more: somebody took it for dead.
        """

    @abstractmethod
    async def owners(self) -> tuple[Owner, ...]:
        """All owners that are registered."""

    @abstractmethod
    async def leave(self, owner: OwnerId) -> None:
        """Strike an owner off: its sessions are anybody's. No error if there is none."""

    @abstractmethod
    async def owned(self, owner: OwnerId) -> frozenset[SessionKey]:
        """The sessions that are an owner's, or were when it left."""

    @abstractmethod
    async def acquire(self, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        """Make a session `owner`'s, and raise its fence from `fence` by one: older writers are refused (N1).

        The owner before, if it was another and is registered, has one loss more.

        Returns:
            the new fence.

        Raises:
            ConflictError: no such session, or its fence is not `fence`: somebody else was faster.
        """

    @abstractmethod
    async def commit(self, key: SessionKey, write: Write) -> None:
        """Make one write durable.

        Raises:
            ConflictError: another `committed`, a higher fence, or no such session; nothing was written.
            StorageError: nothing was written, or it is not known to be durable; the same write
                may be tried again (one that had landed is recognised by its numbers and link).
        """

    @abstractmethod
    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """Whole blocks of events `after + 1 … upto`, as many as fit in `limit` bytes, at least one.

        Returns:
            the bytes and the number of the last event in them; `(b"", after)` if nothing is
            committed in that range.

        Raises:
            BelowFloorError: `after` is below the floor.
            StorageError: it cannot be read, or what is there is damaged.
        """

    @abstractmethod
    async def runs(self, key: SessionKey, grain: Grain) -> tuple[Run, ...]:
        """What is retained of a session's outbox, a run of events at a time, in order and without holes.

        Together they are `floor + 1 … committed`; where a run's events reach down to the floor or
        below, it counts only those above. A run is what one write wrote, or several that follow each
        other, up to a grain between them; `at` is the time of the first.

        Raises:
            StorageError: it cannot be read, or what is there is damaged.
        """

    @abstractmethod
    async def link(self, key: SessionKey, seq: int) -> Link | None:
        """`link(seq)`, for `floor <= seq <= committed`; `None` outside (C3).

        Raises:
            StorageError: it cannot be read, or what is there is damaged.
        """

    @abstractmethod
    async def digest(self, key: SessionKey, number: int) -> Digest | None:
        """The digest of inbox message `number`; `None` if there is no such message."""

    @abstractmethod
    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        """Inbox messages with a number above `after`, in order, at most `limit` of them."""

    @abstractmethod
    async def sessions(self, before: float | None = None) -> tuple[Stored, ...]:
        """All sessions, oldest first; or those that were last written before a Unix time."""

    @abstractmethod
    async def remove(self, key: SessionKey) -> None:
        """Forget a session altogether; durable on return. No error if there is none."""

    @abstractmethod
    def release(self, key: SessionKey) -> None:
        """This process serves the session no more: what was held in memory to be quick may go."""
