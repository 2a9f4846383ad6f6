"""A network without sockets: TCP connections as two asyncio transports, with bytes that take their time.

What speaks on either side is what speaks on a real network: httpx2, websockets and uvicorn, down to
their bytes. The network cuts writes where it likes, delays them, and loses whole connections in the
ways TCP does: a reset that both sides hear of, one that only one side hears of, and silence.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any, Final, Literal

from tests.simulation.loop import Loop, Process, current
from tests.simulation.trace import Trace

__all__ = ["Connection", "End", "Network"]

_WINDOW: Final = 64 * 1024
"""Bytes that may be under way or unread in one direction; what is written above it stays with the writer."""
_GIVEN_UP: Final = 30.0
"""Seconds after which a server's kernel gives up a peer that acknowledges nothing, as in `gapless serve`."""

_Item = bytes | Literal["eof", "reset"]
Address = tuple[str, int] | str
"""A host and a port, or the path of a Unix socket."""
Factory = Callable[[], asyncio.Protocol]


class Listener:
    """Where a process accepts connections."""

    def __init__(self, network: Network, at: Address, process: Process, factory: Factory) -> None:
        self._network = network
        self.at = at
        self.process = process
        self.factory = factory

    def close(self) -> None:
        """Accept no more."""
        self._network.close(self)

    def getsockname(self) -> Address:
        """The address: this is also what stands for a bound socket."""
        return self.at


class Network:
    """All connections of a simulation.

    Attributes:
        rough: how likely a new connection is to come to a bad end by itself.
        latency: the least and the most seconds that something is under way.
    """

    def __init__(self, loop: Loop, random: Random, trace: Trace) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.rough = 0.0
        self.latency = (0.0005, 0.02)
        self.connections: list[Connection] = []
        self._listeners: dict[Address, list[Listener]] = {}
        self._dark: set[str] = set()
        self._count = 0
        loop.connect, loop.listen = self.connect, self.listen

    def delay(self, local: bool = False) -> float:
        """Seconds that something takes on its way."""
        low, high = (0.00001, 0.0002) if local else self.latency
        often = self.random.random() < 0.9
        return self.random.uniform(low, high) if often else self.random.uniform(high, 20 * high)

    def listen(self, at: Address, process: Process, factory: Factory) -> Listener:
        """Accept connections at an address, as `process`; of several who do, each gets some."""
        listener = Listener(self, at, process, factory)
        self._listeners.setdefault(at, []).append(listener)
        return listener

    def close(self, listener: Listener) -> None:
        """Nobody listens there any more, and nothing is left of it."""
        at = self._listeners.get(listener.at, [])
        if listener in at:
            at.remove(listener)

    def forget(self, at: Address) -> None:
        """Nothing is left of an address: the file of a Unix socket is removed."""
        self._listeners.pop(at, None)

    def darken(self, host: str) -> None:
        """A machine is off: whoever calls it hears nothing."""
        self._dark.add(host)

    def lighten(self, host: str) -> None:
        """It is on again."""
        self._dark.discard(host)

    def is_dark(self, host: str) -> bool:
        """Whether a machine is off."""
        return host in self._dark

    async def connect(self, factory: Factory, at: Address) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """What `loop.create_connection` and `loop.create_unix_connection` are here."""
        local = isinstance(at, str)
        await asyncio.sleep(self.delay(local))
        while self.is_dark(_host(at)):  # noqa: ASYNC110
            await asyncio.sleep(1.0)  # a SYN now and then
        listeners = self._listeners.get(at, [])
        if local and not listeners:
            raise FileNotFoundError(2, "No such file or directory", at)
        living = [listener for listener in listeners if listener.process.alive]
        if not living:
            await asyncio.sleep(self.delay(local))
            raise ConnectionRefusedError(111, f"nobody listens at {at}")
        listener = self.random.choice(living)
        connection = Connection(self, self._count, at, current(), listener.process)
        self._count += 1
        self.connections.append(connection)
        connection.server.accept(listener.factory)
        try:
            await asyncio.sleep(self.delay(local))
        except BaseException:
            connection.client.abort()
            raise
        if connection.client.lost:
            raise ConnectionResetError(104, "reset before it was there")
        protocol = factory()
        connection.client.begin(protocol)
        if not local and self.random.random() < self.rough:
            connection.plan()
        return connection.client, protocol

    def of(self, process: Process) -> list[End]:
        """The open ends of a process."""
        ends = [end for c in self.connections for end in (c.client, c.server)]
        return [end for end in ends if end.process is process and not end.lost]

    def died(self, process: Process, *, machine: bool) -> None:
        """A process is dead: its kernel tells its peers, unless that is dead as well."""
        for end in self.of(process):
            end.lost = end.closing = True
            if not machine:
                end.emit(self.random.choice(("reset", "eof")))


class Connection:
    """One TCP connection."""

    def __init__(self, network: Network, number: int, to: Address, client: Process, server: Process) -> None:
        self.network = network
        self.number = number
        self.local = isinstance(to, str)
        here = "" if self.local else ("127.0.0.2", 40000 + number)
        self.client = End(self, client, here, to, None)
        self.server = End(self, server, to, here, _GIVEN_UP)
        self.client.peer, self.server.peer = self.server, self.client
        network.trace.note("network", f"{number} {client} → {server}")

    @property
    def open(self) -> bool:
        """Whether either side still has it."""
        return not (self.client.lost and self.server.lost)

    def plan(self) -> None:
        """Come to a bad end, some time."""
        random = self.network.random
        after = random.choice((random.uniform(0.0, 0.1), random.uniform(0.0, 5.0)))
        ends = (self.reset, self.reset_client, self.reset_server, self.silence, self.deafen, self.mute)
        what = random.choice(ends)
        self.network.loop.schedule(self.network.loop.now + after, what)

    def reset(self) -> None:
        """Both sides hear that it is over."""
        self.reset_client()
        self.reset_server()

    def reset_client(self) -> None:
        """The client hears that it is over; the server hears nothing any more."""
        self._note("reset for its client")
        self.server.muted = True
        self.client.receive("reset")

    def reset_server(self) -> None:
        """The server hears that it is over; the client hears nothing any more."""
        self._note("reset for its server")
        self.client.muted = True
        self.server.receive("reset")

    def silence(self) -> None:
        """Nobody hears anything any more."""
        self.mute()
        self.deafen()

    def mute(self) -> None:
        """What the client sends is lost."""
        self._note("loses what its client sends")
        self.client.mute()

    def deafen(self) -> None:
        """What the server sends is lost."""
        self._note("loses what its server sends")
        self.server.mute()

    def hold(self, seconds: float) -> None:
        """Nothing passes for a while, and then everything."""
        self._note(f"holds everything for {seconds:.2f}")
        for end in (self.client, self.server):
            end.free_at = max(end.free_at, self.network.loop.now + seconds)

    def _note(self, what: str) -> None:
        if self.open:
            self.network.trace.note("network", f"{self.number} {what}")


class End(asyncio.Transport):
    """One side of a connection, as its process has it.

    Attributes:
        muted: what this side sends is lost.
        free_at: nothing this side sends arrives before.
    """

    peer: End

    def __init__(
        self, connection: Connection, process: Process, here: Address, there: Address, patience: float | None
    ) -> None:
        self.connection = connection
        self.network = connection.network
        self.process = process
        self.closing = False
        self.lost = False
        self.muted = False
        self.free_at = 0.0
        self._patience = patience
        self._impatient = False
        self._protocol: asyncio.Protocol | None = None
        self._context: Context = process.context.copy()
        self._reading = True
        self._showing = False
        self._unread: deque[_Item] = deque()
        self._outstanding = 0
        self._full = False
        self._high, self._low = 64 * 1024, 16 * 1024
        self._eof_sent = False
        self._socket = _Socket(self, here, there)

    # Beginning ------------------------------------------------------------------------------------

    def accept(self, factory: Factory) -> None:
        """The server's kernel has accepted it; its process will see."""

        def made() -> None:
            if not self.lost:
                self.begin(factory())

        self.network.loop.call_soon(made, context=self._context)

    def begin(self, protocol: asyncio.Protocol) -> None:
        """Hand it to a protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._hand_over()

    # Sending --------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        data = bytes(data)
        if self.closing or self._eof_sent or not data or not self.process.alive:
            return
        self._outstanding += len(data)
        random = self.network.random
        if len(data) > 1 and random.random() < 0.1:
            at = random.randrange(1, len(data))
            self.emit(data[:at])
            self.emit(data[at:])
        else:
            self.emit(data)
        if not self._full and self._outstanding - _WINDOW > self._high and self._protocol is not None:
            self._full = True
            self._protocol.pause_writing()

    def emit(self, item: _Item) -> None:
        """Put something on its way."""
        loop = self.network.loop
        if self.muted:
            self._lose()
            return
        self.free_at = max(self.free_at, loop.now + self.network.delay(self.connection.local))
        loop.schedule(self.free_at, self._arrive, item)

    def mute(self) -> None:
        """From now on what is sent is lost."""
        self.muted = True

    def _lose(self) -> None:
        if self._patience is not None and not self._impatient:
            self._impatient = True
            self.network.loop.schedule(self.network.loop.now + self._patience, self.receive, "reset")

    def _arrive(self, item: _Item) -> None:
        if self.muted:
            self._lose()  # it was under way when the line went
        else:
            self.peer.receive(item)

    def _taken(self, size: int) -> None:
        """The peer has read something."""
        self._outstanding -= size
        if self._full and max(0, self._outstanding - _WINDOW) <= self._low:
            self._full = False
            if self._protocol is not None and not self.lost:
                self.network.loop.call_soon(self._protocol.resume_writing, context=self._context)

    # Receiving ------------------------------------------------------------------------------------

    def receive(self, item: _Item) -> None:
        """Something has arrived."""
        network = self.network
        if self.lost:
            self._receive_in_vain(item)
            return
        if item == "reset":
            network.trace.note(self.process, f"{self.connection.number} reset")
            self._unread.clear()
            self._lost(ConnectionResetError(104, "Connection reset by peer"))
            return
        network.trace.note(self.process, f"{self.connection.number} {item if item == 'eof' else len(item)}")
        self._unread.append(item)
        self._hand_over()

    def _receive_in_vain(self, item: _Item) -> None:
        """Nobody has this end any more: its kernel says so, if there is one."""
        network = self.network
        if not isinstance(item, bytes):
            return
        if network.is_dark(self._socket.host):
            network.loop.schedule(network.loop.now + 1.0, self.receive, item)  # it is sent again and again
        elif not self.muted:
            self.emit("reset")

    def _hand_over(self) -> None:
        """Show the protocol the next thing, if it is ready to see one."""
        if self._unread and self._reading and self._protocol is not None and not self._showing:
            self._showing = True
            self.network.loop.call_soon(self._show, context=self._context)

    def _show(self) -> None:
        self._showing = False
        if self.closing or not self._reading or not self._unread or self._protocol is None:
            return
        item = self._unread.popleft()
        if isinstance(item, bytes):
            self.peer._taken(len(item))
            self._protocol.data_received(item)
        elif not self._protocol.eof_received():
            self.close()
        self._hand_over()

    @property
    def readable(self) -> bool:
        """Whether a look at the socket would show something."""
        return bool(self._unread) or self.lost

    # What asyncio asks of a transport -----------------------------------------------------------------

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self._eof_sent:
                self.emit("eof")
            self._lost(None)

    def abort(self) -> None:
        if not self.lost:
            self.closing = True
            self.emit("reset")
            self._lost(None)

    def write_eof(self) -> None:
        if not self._eof_sent and not self.closing:
            self._eof_sent = True
            self.emit("eof")

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._hand_over()

    def is_reading(self) -> bool:
        return self._reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return max(0, self._outstanding - _WINDOW)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "socket":
                return self._socket
            case "sockname":
                return self._socket.getsockname()
            case "peername":
                return self._socket.getpeername()
            case _:
                return default

    def _lost(self, error: Exception | None) -> None:
        self.lost = self.closing = True
        if self._protocol is not None:
            self.network.loop.call_soon(self._protocol.connection_lost, error, context=self._context)


def _host(at: Address) -> str:
    return "" if isinstance(at, str) else at[0]


class _Socket:
    """As much of a socket as is looked at."""

    def __init__(self, end: End, here: Address, there: Address) -> None:
        self._end = end
        self._here, self._there = here, there
        self.family = socket.AF_UNIX if isinstance(here, str) else socket.AF_INET
        self.host = _host(here)

    @property
    def readable(self) -> bool:
        """For httpcore, which asks the kernel whether an idle connection is still good."""
        return self._end.readable

    def getsockname(self) -> Address:
        return self._here

    def getpeername(self) -> Address:
        return self._there

    def setsockopt(self, *_: object) -> None:
        pass

    def fileno(self) -> int:
        return -1
