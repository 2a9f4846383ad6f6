"""What is asked of a SQLite log: each a function of the reader's connection, and of one moment."""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from contextlib import closing
from itertools import chain
from typing import Final

import apsw

from gapless.log.base import (
    BelowFloorError,
    Digest,
    Entry,
    Grain,
    Owner,
    OwnerId,
    Run,
    SessionKey,
    Stored,
    Write,
)
from gapless.log.runs import runs_of
from gapless.log.segments import DamagedError, Segment, Segments, conflict, landed
from gapless.protocol.cursor import Link

__all__ = [
    "confirm",
    "digest",
    "entries",
    "link",
    "load",
    "owned",
    "owners",
    "runs",
    "segments",
    "sessions",
]

_STORED: Final = """
    SELECT key, record, committed, link, floor, floor_link, received, dispatched, fence, created, updated,
        owner
    FROM session"""


def load(db: apsw.Connection, key: SessionKey) -> Stored | None:
    """As `Log.load`."""
    row = db.execute(f"{_STORED} WHERE key = ?", (key,)).fetchone()
    return None if row is None else Stored(*row)


def sessions(db: apsw.Connection, before: float | None = None) -> tuple[Stored, ...]:
    """As `Log.sessions`."""
    which = "key IS NOT NULL AND updated < ifnull(?, 9e999)"
    return tuple(Stored(*row) for row in db.execute(f"{_STORED} WHERE {which} ORDER BY id", (before,)))


def owners(db: apsw.Connection) -> tuple[Owner, ...]:
    """As `Log.owners`."""
    return tuple(Owner(*row) for row in db.execute("SELECT id, address, beat, losses FROM owner ORDER BY id"))


def owned(db: apsw.Connection, owner: OwnerId) -> frozenset[SessionKey]:
    """As `Log.owned`."""
    rows = db.execute("SELECT key FROM session WHERE owner = ? AND key IS NOT NULL", (owner,))
    return frozenset(key for (key,) in rows)


def confirm(db: apsw.Connection, key: SessionKey, write: Write) -> None:
    """Tell a write that has landed before from one that conflicts, and raise for the latter."""
    stored = load(db, key)
    if stored is None or not landed(stored, write, lambda number: digest(db, key, number)):
        raise conflict(stored, write)


def segments(db: apsw.Connection, key: SessionKey, after: int, upto: int, least: int) -> Segments | None:
    """The segments that hold events from `after + 1` to `upto`, until they make `least` bytes.

    `None` where there is no such event.

    Raises:
        BelowFloorError: `after` is below the floor.
        DamagedError: there is a hole.
    """
    rows = db.execute(
        """
        SELECT session.floor, session.committed, segment.first, segment.last, segment.data
        FROM session LEFT JOIN segment
            ON segment.session = session.id AND segment.last > ? AND segment.first <= ?
        WHERE session.key = ? ORDER BY segment.last
        """,
        (after, upto, key),
    )
    run: Segments | None = None
    with closing(rows):
        for floor, committed, first, last, data in rows:
            if after < floor:
                raise BelowFloorError(f"events up to {floor} are evicted: nothing follows {after}")
            if min(upto, committed) <= after:
                return None
            if run is None and first is not None and first <= after + 1:
                run = Segments(first - 1)
            if run is None or first != run.last + 1:
                raise DamagedError(f"event {after + 1 if run is None else run.last + 1} is missing")
            run.append(last, data)
            if run.size >= least:
                break
    return run


def runs(db: apsw.Connection, key: SessionKey, grain: Grain) -> tuple[Run, ...]:
    """As `Log.runs`."""
    rows = db.execute(
        """
        SELECT session.floor, session.committed, session.updated,
            segment.first, segment.last, segment.data, segment.at
        FROM session LEFT JOIN segment ON segment.session = session.id AND segment.last > session.floor
        WHERE session.key = ? ORDER BY segment.last
        """,
        (key,),
    )
    with closing(rows):
        head = rows.fetchone()
        if head is None:
            return ()
        floor, committed, updated, *segment = head
        every = () if segment[0] is None else chain([head], rows)
        segments = (Segment(first, last, data, at or updated) for _, _, _, first, last, data, at in every)
        return runs_of(segments, floor, committed, grain)


def link(db: apsw.Connection, key: SessionKey, seq: int) -> Link | None:
    """As `Log.link`."""
    row = db.execute(
        """
        SELECT session.committed, session.link, session.floor, session.floor_link,
            segment.first, segment.last, segment.data
        FROM session LEFT JOIN segment ON segment.session = session.id AND segment.last >= ?
        WHERE session.key = ? ORDER BY segment.last LIMIT 1
        """,
        (seq, key),
    ).fetchone()
    if row is None:
        return None
    committed, link, floor, floor_link, *segment = row
    if seq == committed:
        return link
    if seq == floor:
        return floor_link
    if not floor < seq < committed:
        return None
    if segment[0] is None:
        raise DamagedError(f"event {seq} is missing")
    return Segment(*segment).link(seq)


def digest(db: apsw.Connection, key: SessionKey, number: int) -> Digest | None:
    """As `Log.digest`."""
    row = db.execute(
        "SELECT digest FROM session JOIN inbox ON session = session.id WHERE key = ? AND number = ?",
        (key, number),
    ).fetchone()
    return None if row is None else row[0]


def entries(db: apsw.Connection, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
    """As `Log.entries`."""
    rows = db.execute(
        """
        SELECT number, digest, data FROM session JOIN inbox ON session = session.id
        WHERE key = ? AND number > ? ORDER BY number LIMIT ?
        """,
        (key, after, max(limit, 0)),
    )
    return tuple(Entry(*row) for row in rows)
