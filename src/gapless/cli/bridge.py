"""`gapless bridge`: a Gapless server as a stdio MCP server, for hosts that only know how to start one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from gapless.cli.headers import Headers, read_headers
from gapless.cli.loop import loop_factory
from gapless.cli.output import examples, fail
from gapless.errors import GaplessError

if TYPE_CHECKING:
    from gapless.cli.bridging import Bridge

__all__ = ["BRIDGE_EXAMPLES", "bridge"]

BRIDGE_EXAMPLES: Final = examples(
    "gapless bridge http://127.0.0.1:8000/mcp",
    "gapless bridge https://tools.example.com/mcp --header 'Authorization: Bearer ${TOKEN}'",
)

_PATIENCE: Final = 2.0
"""Seconds after its end in which the process leaves, whatever still runs."""


def bridge(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server: https://tools.example.com/mcp, for example.")
    ],
    *,
    header: Headers = None,
    upgrade: Annotated[
        Literal["auto", "never", "require"],
        typer.Option(help="Move to a WebSocket: if it can be done, never, or fail without."),
    ] = "auto",
    wait: Annotated[
        float,
        typer.Option(metavar="<seconds>", min=0, help="How long to try for a session before giving up."),
    ] = 10.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show on stderr how cursor and transport move.")
    ] = False,
) -> None:
    r"""Be a stdio MCP server for a host, and carry its messages to a Gapless server.

    For hosts that start their servers as commands. In a host's configuration:

    {"mcpServers": {"tools": {"command": "gapless", "args": \["bridge", "URL"]}}}

    The host does not notice when the network drops. When the session ends, open
    requests are answered with an error and the exit status is 1: a host that starts
    the command again has a new session.
    """
    headers = read_headers(header)

    from gapless.cli.bridging import Bridge
    from gapless.cli.display import Display
    from gapless.cli.pipes import Pipes

    display = Display("bridge", watch=True) if watch else None
    observe = None if display is None else display.observe

    async def run() -> None:
        carrying = Bridge(url, Pipes(), headers=headers, upgrade=upgrade, wait=wait, observe=observe)
        _stop_on_signals(carrying)
        try:
            await carrying.run()
        except OSError as error:
            raise GaplessError(f"cannot write to stdout: {error.strerror}") from error
        finally:
            _leave_in_time(carrying)
        if carrying.error is not None:
            raise carrying.error

    with display or nullcontext(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def _stop_on_signals(carrying: Bridge) -> None:
    loop = asyncio.get_running_loop()
    asked = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        loop.call_soon_threadsafe(carrying.leave)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _leave_in_time(carrying: Bridge) -> None:
    """A thread that nobody can stop (one that looks up a name, say) must not hold up the end."""

    def leave() -> None:
        os._exit(0 if carrying.error is None else fail(carrying.error))

    timer = threading.Timer(_PATIENCE, leave)
    timer.daemon = True
    timer.start()
