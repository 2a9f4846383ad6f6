"""Logs to audit: written by the real machine into the real log, and damaged by hand afterwards."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw

from gapless.client.receipts import HEADER, Line, Turn, read_receipts
from gapless.log.base import Log, SessionKey
from gapless.log.sqlite import SqliteLog
from gapless.protocol.cursor import START, EventId, Link
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import Cursor, Emitted, End, Handshake, Upgrade
from gapless.protocol.jsonrpc import peek
from gapless.protocol.record import write_record
from gapless.protocol.refusal import Reason
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from gapless.server.intake import message_input
from gapless.server.live import as_write

__all__ = ["TOKEN", "Paper", "Written", "damage", "event_id", "ids", "write_log"]

TOKEN = "the-token-of-a-session-which-is-a-secret-43"


class Written:
    """One session: what is put into its machine is committed to its log, a commit for each call."""

    def __init__(self, log: Log, token: str = TOKEN, view: View = View.SESSION, **limits: Any) -> None:
        self.log = log
        self.key = SessionKey(sha256(token.encode()).digest())
        self.link = Link(self.key[:8])
        self.machine = Session(view, self.link, Limits(**limits), "fsync", 0.0)
        self._ended: float | None = None
        self._connections = 0

    async def open(self) -> None:
        """Make the session."""
        await self.log.create(self.key, write_record(self.machine, "anonymous", None), self.link)

    async def commit(self) -> None:
        """Make durable what is pending."""
        self.machine.evict(0.0)
        commit = self.machine.take()
        record = write_record(self.machine, "anonymous", self._ended) if commit.record else None
        await self.log.commit(self.key, as_write(commit, record, 0))
        self.machine.confirm(commit)

    async def send(self, *messages: Any) -> None:
        """The client sends messages; bytes are sent as they are."""
        for message in messages:
            number = self.machine.inbox.received + 1
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            connection = ConnectionId(0) if self.machine.view is View.STREAM else None
            self.machine.handle(
                message_input(data, 1 << 20, number=number, process="p", answer_on=connection), 0.0
            )
        await self.commit()

    async def ask(self, *ids: int | str, method: str = "tools/call") -> None:
        """The client sends requests."""
        await self.send(*({"jsonrpc": "2.0", "id": id, "method": method, "params": {}} for id in ids))

    async def cancel(self, id: int | str) -> None:
        """The client cancels a request."""
        params = {"requestId": id}
        await self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

    async def say(self, *messages: dict[str, Any]) -> None:
        """The backend emits messages."""
        for message in messages:
            data = json.dumps({"jsonrpc": "2.0", **message}).encode()
            self.machine.handle(Emitted(data, peek(data)), 0.0)
        await self.commit()

    async def note(self, count: int, size: int = 1) -> None:
        """The backend emits notifications."""
        first = self.machine.outbox.head + 1
        text = "x" * size
        await self.say(*({"method": "n", "params": {"n": first + n, "text": text}} for n in range(count)))

    async def answer(self, *ids: int | str) -> None:
        """The backend answers requests."""
        await self.say(*({"id": id, "result": {}} for id in ids))

    async def upgrade(self, nonce: str, *, steps: int, bind: bool = True) -> None:
        """The client goes through the door, and its socket breaks; or it gets no further than the offer."""
        cursor = Cursor(START, None)
        if steps == 2:
            self.machine.handle(Upgrade(cursor, nonce, f"ticket-{nonce}", "/"), 0.0)
        if bind:
            self._connections += 1
            connection = ConnectionId(self._connections)
            ticket = f"ticket-{nonce}" if steps == 2 else None
            self.machine.handle(Handshake(connection, cursor, ticket, nonce, "/"), 0.0)
            self.machine.connections.clear()
            await self.commit()
            self.machine.door.state = type(self.machine.door.state).SSE_ACTIVE
            self.machine.door.unbind()
            self.machine._changed = True
        await self.commit()

    async def end(self) -> None:
        """Somebody ends the session."""
        self._ended = 0.0
        self.machine.handle(End(Reason.SESSION_ENDED, ""), 0.0)
        await self.commit()


def write_log(path: Path, *sessions: Callable[[Written], Awaitable[None]], **options: Any) -> Path:
    """A log at rest, with a session for each of `sessions`, under `TOKEN`, `TOKEN1` and so on."""

    async def write() -> None:
        log = SqliteLog(path)
        await log.start()
        for number, fill in enumerate(sessions):
            written = Written(log, TOKEN + (str(number) if number else ""), **options)
            await written.open()
            await fill(written)
        await log.close()

    asyncio.run(write())
    return path


def damage(path: Path, sql: str, *values: Any) -> None:
    """Change a log behind its back."""
    with closing(apsw.Connection(str(path))) as db:
        before = db.total_changes()
        db.execute(sql, values)
        assert db.total_changes() > before, "the damage did nothing"


def ids(path: Path, token: str = TOKEN) -> list[str]:
    """The IDs of a session's events, as the log has them, from `link(0)` on."""
    key = sha256(token.encode()).digest()
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        rows = db.execute(
            "SELECT data FROM segment JOIN session ON session = session.id WHERE key = ? ORDER BY last",
            (key,),
        )
        lines = b"".join(row[0] for row in rows).decode().splitlines()
    return [f"0.0.{key[:8].hex()}"] + [line[4:] for line in lines if line.startswith("id: ")]


class Paper:
    """A receipts file, line by line; every line is a second after the one before."""

    def __init__(self, token: str = TOKEN) -> None:
        self.session = sha256(token.encode()).hexdigest()[:16]
        self.lines: list[str] = []

    def add(self, text: str, session: str | None = None) -> None:
        """A line."""
        at = len(self.lines)
        self.lines.append(f"2026-01-02T10:{at // 60:02}:{at % 60:02}.000Z {session or self.session} {text}\n")

    def turn(self, turn: Turn, detail: str = "") -> str:
        """A line for a turn, and how an audit names it."""
        self.add(f"{turn} {detail}".rstrip())
        return f"{turn} at {self.lines[-1][11:24]}"

    def take(self, *ids: str) -> None:
        """Lines for events."""
        for id in ids:
            self.add(id)

    def at(self, id: str) -> int:
        """Which line is an event's."""
        (found,) = [at for at, line in enumerate(self.lines) if line.split(" ", 2)[2] == f"{id}\n"]
        return found

    @property
    def text(self) -> bytes:
        """The file."""
        return HEADER + "".join(self.lines).encode()

    def read(self) -> Iterator[Line]:
        """What a reader makes of it."""
        return read_receipts(io.BytesIO(self.text), len(self.text))


def event_id(text: str, **changes: Any) -> str:
    """An ID with something in it changed."""
    seq, stream, link = text.split(".")
    parts = {"seq": int(seq), "stream": int(stream), "link": Link(bytes.fromhex(link)), **changes}
    return str(EventId(**parts))
