"""A TCP proxy on loopback that does to a connection what networks do: cut, hold, swallow, half-open.

It forwards bytes and understands only the first line of each request, to tell connections apart.
Faults are asked for at any time on a `Link`, or armed to strike when a pattern passes.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["Direction", "FaultProxy", "Link"]

_CHUNK: Final = 64 * 1024
_LINGER_RESET: Final = struct.pack("ii", 1, 0)


_HOP_BY_HOP: Final = re.compile(rb"(?im)^(?:upgrade|connection):[^\r\n]*\r\n")


class Direction(Enum):
    """Which way bytes go."""

    TO_SERVER = "to-server"
    TO_CLIENT = "to-client"


@dataclass(slots=True)
class _Trap:
    direction: Direction
    pattern: bytes
    action: Callable[[Link], None]
    seen: bytes = b""
    before: bool = False


class Link:
    """One proxied connection."""

    def __init__(
        self,
        number: int,
        client: asyncio.StreamWriter,
        server: asyncio.StreamWriter,
        requested: Callable[[Link], None],
    ) -> None:
        self.number = number
        self._requested = requested
        self.request = ""
        """The first line of the latest request, and ` upgrade` if that asked for a WebSocket."""
        self.open = True
        self._ends = {Direction.TO_CLIENT: client, Direction.TO_SERVER: server}
        self._swallowed: set[Direction] = set()
        self._gates: dict[Direction, asyncio.Event] = {}
        self._traps: list[_Trap] = []
        self._stripping = False
        for direction in Direction:
            self._gates[direction] = asyncio.Event()
            self._gates[direction].set()

    @property
    def carries_events(self) -> bool:
        """Whether this is an event stream or a WebSocket."""
        return "/events" in self.request

    @property
    def upgraded(self) -> bool:
        """Whether a WebSocket handshake was sent on it."""
        return self.request.endswith(" upgrade")

    def reset(self) -> None:
        """RST on both sides: what was in flight is gone."""
        self.open = False
        for writer in self._ends.values():
            raw = writer.get_extra_info("socket")
            with suppress(OSError):  # it may be closed already
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            writer.transport.abort()

    def close(self) -> None:
        """FIN on both sides, after what is in flight."""
        self.open = False
        for writer in self._ends.values():
            writer.close()

    def black_hole(self, *directions: Direction) -> None:
        """From now on bytes and FINs vanish, in the directions named, both by default: half-open."""
        self._swallowed.update(directions or Direction)

    def hold(self, direction: Direction) -> None:
        """Stop forwarding, without losing anything, until `release`."""
        self._gates[direction].clear()

    def release(self, direction: Direction) -> None:
        """Forward what was held."""
        self._gates[direction].set()

    def strip_upgrade(self) -> None:
        """Make the handshake that is about to be forwarded a plain GET, as some proxies do."""
        self._stripping = True

    def arm(
        self,
        direction: Direction,
        pattern: bytes,
        action: Callable[[Link], None],
        *,
        before: bool = False,
    ) -> None:
        """Do `action` once `pattern` has passed, or, with `before`, instead of letting it pass."""
        self._traps.append(_Trap(direction, pattern, action, before=before))

    async def pump(self, direction: Direction, reader: asyncio.StreamReader) -> None:
        """Forward one direction until it ends."""
        writer = self._ends[direction]
        try:
            while data := await reader.read(_CHUNK):
                if direction is Direction.TO_SERVER:
                    self._note_request(data)
                    if self._stripping:
                        data = _HOP_BY_HOP.sub(b"", data)
                        self._stripping = False
                data, actions = self._spring(direction, data)
                await self._gates[direction].wait()
                if not self.open:
                    return
                if direction not in self._swallowed:
                    writer.write(data)
                    await writer.drain()
                for action in actions:
                    action(self)
            if direction not in self._swallowed and self.open and writer.can_write_eof():
                writer.write_eof()
        except (OSError, RuntimeError):
            pass  # one side is gone; the other is told below
        if direction not in self._swallowed:
            self.open = False
            for end in self._ends.values():
                end.close()

    def _note_request(self, data: bytes) -> None:
        line, _, rest = data.partition(b"\r\n")
        if line.endswith(b" HTTP/1.1"):
            upgrade = b"upgrade: websocket" in rest.lower()
            self.request = line.decode("latin-1").removesuffix(" HTTP/1.1") + (" upgrade" if upgrade else "")
            self._requested(self)

    def _spring(self, direction: Direction, data: bytes) -> tuple[bytes, list[Callable[[Link], None]]]:
        """The traps that this chunk springs: what of it still passes, and what is to be done then."""
        actions: list[Callable[[Link], None]] = []
        for trap in [trap for trap in self._traps if trap.direction is direction]:
            text = trap.seen + data
            at = text.find(trap.pattern)
            if at < 0:
                trap.seen = text[-len(trap.pattern) :]
                continue
            self._traps.remove(trap)
            actions.append(trap.action)
            if trap.before:
                return data[: max(0, at - len(trap.seen))], actions
        return data, actions


class FaultProxy:
    """Listens on a loopback port and forwards to another one.

    Args:
        on_request: called with a link when the first bytes of a request have come, before they
            are forwarded.
    """

    def __init__(self, host: str, port: int, on_request: Callable[[Link], None] | None = None) -> None:
        self._upstream = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self.on_request = on_request
        self.links: list[Link] = []
        self.refusing = False
        """While set, connections are reset as soon as they are accepted."""

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)

    async def close(self) -> None:
        """Drop every link and stop listening."""
        assert self._server is not None
        self._server.close()
        for link in self.links:
            for direction in Direction:
                link.release(direction)
            link.reset()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _requested(self, link: Link) -> None:
        if self.on_request is not None:
            self.on_request(link)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream, limit=_CHUNK)
        except OSError:
            writer.transport.abort()
            return
        self._count += 1
        link = Link(self._count, writer, up_writer, self._requested)
        self.links.append(link)
        try:
            up = link.pump(Direction.TO_SERVER, reader)
            await asyncio.gather(up, link.pump(Direction.TO_CLIENT, up_reader))
        finally:
            self.links.remove(link)
            for end in (writer, up_writer):
                end.close()
