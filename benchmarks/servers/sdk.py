"""The official SDK's server under uvicorn, with an event store in memory.

uvicorn has uvloop and httptools here, as Gapless does. The store is that of the SDK's own example (the last
100 events of each stream, found by ID), but numbers its events where the example draws a UUID for each.

    python sdk.py PORT
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import count

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage

from benchmarks.servers.emitter import server

KEPT = 100


class MemoryStore(EventStore):
    """The newest events of each stream."""

    def __init__(self) -> None:
        self._ids = map(str, count(1))
        self._streams: dict[str, deque[tuple[str, JSONRPCMessage | None]]] = {}
        self._stream_of: dict[str, str] = {}

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep one, and let the oldest go."""
        id = next(self._ids)
        kept = self._streams.setdefault(stream_id, deque())
        if len(kept) == KEPT:
            del self._stream_of[kept.popleft()[0]]
        kept.append((id, message))
        self._stream_of[id] = stream_id
        return id

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send what follows an event in its stream."""
        stream = self._stream_of.get(last_event_id)
        if stream is None:
            return None
        for id, message in [*self._streams[stream]]:
            if int(id) > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, id))
        return stream


if __name__ == "__main__":
    app = server.streamable_http_app(event_store=MemoryStore())
    quiet = {"log_level": "warning", "access_log": False, "server_header": False}
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), **quiet)
