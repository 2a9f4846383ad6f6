"""The official Python SDK, with an event store that answers from SQLite.

The SDK leaves a real store to the user ("No shipped `EventStore`",
https://github.com/modelcontextprotocol/python-sdk/blob/main/docs/run/deploy.md; "a production server
would back the `EventStore` interface with persistent storage", its example `sse_polling`). This is the
plain way to write one: a row for each event, and a replay that selects what follows.

    python sqlite.py PORT DIRECTORY
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter

from examples.ladder_server import server


class SQLiteStore(EventStore):
    """Events in one table, in the order in which they were stored."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, stream TEXT, message TEXT)")

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Append one; its ID is its row's."""
        text = message and message.model_dump_json(by_alias=True, exclude_unset=True)
        append = "INSERT INTO events (stream, message) VALUES (?, ?) RETURNING id"
        return str((await self._run(append, stream_id, text))[0][0])

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send what follows it in its stream; a row without a message only primed a connection."""
        found = await self._run("SELECT stream FROM events WHERE id = ?", last_event_id)
        if not found:
            return None
        stream = found[0][0]
        later = "SELECT id, message FROM events WHERE stream = ? AND id > ? AND message NOT NULL ORDER BY id"
        for id, text in await self._run(later, stream, int(last_event_id)):
            await send_callback(EventMessage(jsonrpc_message_adapter.validate_json(text), str(id)))
        return stream

    async def _run(self, statement: str, *values: str | int | None) -> list[tuple]:
        return await asyncio.to_thread(lambda: self._database.execute(statement, values).fetchall())


if __name__ == "__main__":
    app = server.streamable_http_app(event_store=SQLiteStore(Path(sys.argv[2]) / "events.db"))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
