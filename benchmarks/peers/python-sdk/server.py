"""The official Python SDK, with the event store of its own example.

As `examples/servers/simple-streamablehttp` in the SDK's repository has it
(https://github.com/modelcontextprotocol/python-sdk/tree/main/examples/servers/simple-streamablehttp):
`streamable_http_app(event_store=InMemoryEventStore())`. That example says that its store is for
demonstration only, and the SDK ships no other. The store is not copied here: the set-up takes the
file, `event_store.py`, out of the SDK's source distribution.

    python server.py PORT DIRECTORY
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys

import uvicorn
from event_store import InMemoryEventStore

from examples.ladder_server import server

app = server.streamable_http_app(event_store=InMemoryEventStore())
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
