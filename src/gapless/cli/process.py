"""The process that serves: its sockets, its signals, its memory, its end."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, Literal

import uvicorn

from gapless.cli.connections import Handshakes, Requests
from gapless.cli.loop import loop_factory
from gapless.errors import GaplessError, UsageError
from gapless.protocol.block import BLOCK_OVERHEAD
from gapless.protocol.refusal import CLOSE_RESTART
from gapless.protocol.settings import Limits
from gapless.server.app import Gapless
from gapless.server.observer import JsonLines, Observer

__all__ = ["Manner", "bind", "give_back_memory", "run"]

_STALLED_MS: Final = 30_000
"""How long a peer may leave what was written unacknowledged before the kernel gives it up."""
_FRAME: Final = 64 * 1024
"""What a frame may hold beside the largest message."""
_GRACE: Final = 2
"""Seconds that connections may take to end after they were told to."""
_PATIENCE: Final = 4.0
"""Seconds after which the process leaves whatever still runs."""
_TRIMMED_EVERY: Final = 10.0
"""Seconds between two times that freed memory goes back to the system, at least."""
_TRIMMING: Final = 0.001
"""The share of time that this takes at most: 0.2 ms with a heap of 100 MB, 70 ms with one of 1 GB."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Bound before anything is started, so that a port in use costs nothing.

    Raises:
        UsageError: no such host. GaplessError: the port cannot be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        hint = "127.0.0.1 is this machine alone, 0.0.0.0 every network"
        raise UsageError(f"--host {host}: there is no such host", hint=hint) from None
    try:
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise _no_port(host, port, error) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
    return listening


def _no_port(host: str, port: int, error: OSError) -> GaplessError:
    match error.errno:
        case errno.EADDRINUSE:
            hint = "stop what uses it, or choose another with --port; 0 takes any that is free"
            return GaplessError(f"port {port} of {host} is in use", hint=hint)
        case errno.EACCES:
            return GaplessError(f"port {port} is reserved", hint="choose one above 1023 with --port")
        case _:
            return GaplessError(f"cannot listen on port {port} of {host}: {os.strerror(error.errno or 0)}")


@dataclass(frozen=True, slots=True)
class Manner:
    """How a process serves: what it logs, and in which form; whose forwarded headers it believes."""

    log_level: Literal["error", "warning", "info"]
    log_format: Literal["text", "json"]
    proxies: tuple[str, ...]


def run(app: Gapless, listening: socket.socket, started: Callable[[], None], manner: Manner) -> None:
    """Serve until SIGINT or SIGTERM; `started` is called when requests are answered.

    Raises:
        GaplessError: the log or the MCP server could not be started, or failed to stop.
    """
    _log_to_stderr(manner)
    with listening, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_serve(app, listening, started, manner))
        except GaplessError:
            raise
        except Exception as error:  # of the MCP server's lifespan
            told = f"the MCP server failed: {type(error).__name__}: {error}"
            raise GaplessError(told, hint="gapless --debug serve ... shows where") from error


def _log_to_stderr(manner: Manner) -> None:
    """Our own loggers only: those of an MCP server in this process are as it has set them up."""
    handler = logging.StreamHandler()
    text = logging.Formatter("gapless: %(levelname)s: %(message)s")
    handler.setFormatter(JsonLines() if manner.log_format == "json" else text)
    level = manner.log_level.upper()
    # Others say more than is ours to tell. At INFO uvicorn logs paths, with the tokens in them; at
    # WARNING, what clients get wrong, which would be lines for anybody to write: those are counted.
    levels = {"gapless": level, "asyncio": "ERROR" if level == "ERROR" else "WARNING", "uvicorn": "ERROR"}
    for name, at in levels.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(at)
        logger.propagate = False


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to us: uvicorn would wait for streams that nobody has told to end."""
        yield


def _requests(limits: Limits, observer: Observer) -> Any:
    """Takes connections, as many as there are descriptors for: the log and MCP servers need some, too."""
    held, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * 4 // 3
    if held != resource.RLIM_INFINITY and held < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            held = more
        wanted = held
    return partial(Requests, limits, wanted * 3 // 4, observer.refused)


def _handshakes(observer: Observer) -> Any:
    """Takes connections over that become sockets."""
    return partial(Handshakes, observer.refused)


async def _serve(app: Gapless, listening: socket.socket, started: Callable[[], None], manner: Manner) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            http=_requests(app.sessions.limits, app.sessions.observer),
            ws=_handshakes(app.sessions.observer),
            # ASGI cannot tell of pongs: our own probes and keep-alives do what pings are for.
            ws_ping_interval=None,
            ws_max_size=app.sessions.limits.max_message_bytes + BLOCK_OVERHEAD + _FRAME,
            lifespan="off",  # below: its errors are to be told in one line
            access_log=False,
            proxy_headers=bool(manner.proxies),
            forwarded_allow_ips=list(manner.proxies),
            server_header=False,
            log_config=None,
            timeout_graceful_shutdown=_GRACE,
        )
    )
    loop = asyncio.get_running_loop()
    stopping = threading.Event()
    for watch in (_leave_in_time, give_back_memory):
        threading.Thread(target=watch, args=[stopping], daemon=True).start()

    def drain() -> None:
        # What uvicorn complains of from here on, streams that are cut say, is meant to be.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        app.sessions.drain(CLOSE_RESTART)

    def stop(number: int, _: FrameType | None) -> None:
        if server.should_exit:
            os._exit(128 + number)  # asked twice: at once; what was acknowledged is durable
        server.should_exit = True
        stopping.set()
        loop.call_soon_threadsafe(drain)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        await app.start()
        started()
        await server.serve(sockets=[listening])
    finally:
        await app.close()


def give_back_memory(stopping: threading.Event, every: float = _TRIMMED_EVERY) -> None:
    """Have the C library give pages that it holds and nobody uses back to the system, every so many seconds.

    glibc does so by itself with the end of its heap only. What long messages leave between things that stay
    is used again, but never given back: a third of the heap after an hour of them.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return  # another C library, with manners of its own
    pause = every
    while not stopping.wait(pause):
        began = time.thread_time()  # not that of waiting for others
        trim(0)
        pause = max(every, (time.thread_time() - began) / _TRIMMING)


def _leave_in_time(stopping: threading.Event) -> None:
    """A thread that nobody can stop (a tool in this process, say) must not hold up the end."""
    stopping.wait()
    time.sleep(_PATIENCE)
    os.write(2, b"gapless: something did not end in time and was left behind\n")
    os._exit(0)
