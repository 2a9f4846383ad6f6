"""A TCP proxy on loopback that does to a connection what networks do: cut, hold, swallow, half-open.

It also does what proxies do to HTTP: buffer, strip, answer, repeat. Other than for that, and to tell
requests apart, it forwards bytes as they come. Faults are asked for at any time on a `Link`, or armed to
strike when a pattern passes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from gapless.torture.http_messages import Head, Messages, Requests, Responses, encode_answer
from gapless.torture.link import CHUNK, Direction, Hooks, Lane, Trap

__all__ = ["Direction", "FaultKind", "FaultProxy", "Link"]

_LINGER_RESET: Final = struct.pack("ii", 1, 0)

_LINGER: Final = 2.0
"""Seconds that the two ends of a link that was closed have to take what is in flight, and to close too."""

_REPEAT: Final = 10.0
"""Seconds that the answer to a repeated request is waited for."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class FaultKind(Enum):
    """Every kind of fault. A value is the name of a method of `Link`; `REFUSE`'s is `FaultProxy`'s switch."""

    RESET = "reset"
    CLOSE = "close"
    HALF_CLOSE = "half_close"
    BLACK_HOLE = "black_hole"
    HOLD = "hold"
    DELAY = "delay"
    THROTTLE = "throttle"
    SPLIT = "split"
    COALESCE = "coalesce"
    BUFFER_RESPONSE = "buffer_response"
    STRIP_UPGRADE = "strip_upgrade"
    STRIP_HEADERS = "strip_headers"
    ANSWER = "answer"
    REPEAT = "repeat"
    REFUSE = "refusing"


class Link:
    """One proxied connection: two lanes of bytes, and what can be done to them.

    An end or a reset of one side is passed on to the other like bytes are: as late, held as long, or
    swallowed. The methods may be called at any time, from callbacks too. Those that concern a request
    mean, in `on_request`, the one just seen, and else the next one; where the connection carries no
    HTTP, or no more since a 101, there is none.

    Attributes:
        number: counts the links of a proxy, from 1.
        open: false once it was reset, closed, or has ended.
        request: method and target of the latest request, and ` upgrade` if that is a WebSocket handshake.
        headers: of the latest request, by lower-case name.
    """

    def __init__(
        self,
        number: int,
        proxy: FaultProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.number = number
        self.open = True
        self.request = ""
        self.headers: Mapping[str, str] = _NONE
        self._proxy = proxy
        self._writers = (client[1], server[1])
        hooks = Hooks(self._seen, self._broken, self._ended)
        self._requests = Requests(client[0], server[1], hooks, self._asked, proxy.send_again)
        self._responses = Responses(server[0], client[1], hooks)
        self._responses.couple(self._requests)
        self._lanes: dict[Direction, Lane] = {
            Direction.TO_SERVER: self._requests,
            Direction.TO_CLIENT: self._responses,
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._over = False

    @property
    def carries_events(self) -> bool:
        """Whether this is an event stream or a WebSocket."""
        return "/events" in self.request

    @property
    def upgraded(self) -> bool:
        """Whether a WebSocket handshake was sent on it."""
        return self.request.endswith(" upgrade")

    # The connection ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """RST on both sides: what was in flight is gone."""
        if self.open:
            for direction in Direction:
                self._seen(direction, 0, "rst")
        for writer in self._writers:
            _reset(writer)
        self._end()

    def close(self) -> None:
        """FIN on both sides, after what is in flight, which is not delayed any longer.

        What is held is lost, and so is what a black hole got. The two sides have 2 s to take the rest
        and to close too.
        """
        if not self.open:
            return
        for lane in self._lanes.values():
            lane.close()
        self._linger()

    def half_close(self, direction: Direction) -> None:
        """FIN in this direction, as with `close`; the other one goes on."""
        self._lanes[direction].close()

    def black_hole(self, *directions: Direction) -> None:
        """From now on bytes, FINs and RSTs vanish, in the directions named, both by default: half-open.

        Requests that vanish are noticed all the same. `reset`, `close` and `half_close` still work.
        """
        for direction in directions or Direction:
            self._lanes[direction].swallowing = True

    # The bytes ---------------------------------------------------------------------------------------

    def hold(self, direction: Direction) -> None:
        """Stop forwarding, without losing anything, until `release`. After 1 MiB it stops reading, too."""
        self._lanes[direction].hold(True)

    def release(self, direction: Direction) -> None:
        """Forward what was held."""
        self._lanes[direction].hold(False)

    def delay(self, direction: Direction, seconds: float) -> None:
        """Let every chunk arrive so much later, in order; 0 ends it.

        Chunks wait together, up to 1 MiB of them; then it stops reading.
        """
        self._lanes[direction].delay(seconds)

    def throttle(self, direction: Direction, bytes_per_second: float) -> None:
        """Forward no faster than this; 0 ends it."""
        self._lanes[direction].throttle(bytes_per_second)

    def split(self, direction: Direction, size: int = 1) -> None:
        """Forward in pieces of `size` bytes, each its own segment; 0 ends it.

        Between two, the loop turns a few times. A reader that is slower than that sees fewer cuts.
        """
        self._lanes[direction].split(size)

    def coalesce(self, direction: Direction, seconds: float) -> None:
        """Gather what comes within `seconds` of a first chunk, and forward it as one write; 0 ends it."""
        self._lanes[direction].coalesce(seconds)

    def arm(
        self,
        direction: Direction,
        pattern: bytes,
        action: Callable[[Link], None],
        *,
        before: bool = False,
    ) -> None:
        """Do `action` once, when `pattern` has passed, or, with `before`, when it is about to pass.

        The action strikes at that byte: what follows, with `before` the pattern itself, meets the link
        as the action leaves it. If nothing was done against it, it passes; after `hold`, it comes with
        `release`; and where the action closes, what has come still passes, but with `before` does not.

        The pattern is looked for in what is forwarded or swallowed from now on, wherever that is split.
        With `before`, no byte of it passes: what came last and may begin it waits for what comes next,
        or for the end. So choose none that begins as messages end. To arm the same again, before it has
        sprung, changes nothing.
        """
        trap = Trap(pattern, before, action, partial(action, self))
        self._lanes[direction].arm(trap)

    # The messages ------------------------------------------------------------------------------------

    def buffer_response(self) -> None:
        """Let nothing of the response pass until it has ended, or the server's side has; then everything.

        It is the response to the request just seen, or the rest of one that is under way. One of more
        than 8 MiB is buffered no further.
        """
        self._responses.buffering = True

    def strip_upgrade(self) -> None:
        """Forward the next handshake without its hop-by-hop headers, as some proxies do: as a plain GET."""
        self._requests.strips_upgrade = True

    def strip_headers(self, direction: Direction, *names: str) -> None:
        """Take these header lines out of the next request, or the next response that is not interim.

        A response of which something has passed already is not the next.
        """
        lower = frozenset(name.lower() for name in names)
        if direction is Direction.TO_SERVER:
            self._requests.strips |= lower
        else:
            self._responses.strip(lower)

    def answer(
        self,
        status: int,
        content_type: str = "text/plain",
        body: bytes = b"",
        headers: Mapping[str, str] = _NONE,
    ) -> None:
        """Answer the request in the server's place, then close. No byte of it reaches the server.

        Args:
            headers: more of them, or others in place of those that the answer has.
        """
        self._requests.answer = encode_answer(status, content_type, body, headers)

    def repeat(self) -> None:
        """Send the request to the server twice, as a proxy does that retries.

        The second goes on a connection of its own, once the first was forwarded whole, its body
        included. Its answer is thrown away, after 10 s at the latest. A request of more than 8 MiB, or
        one that a black hole got, is not repeated.
        """
        self._requests.repeats = True

    # For the proxy -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Forward until both directions have ended."""
        try:
            if self._proxy.on_link is not None:
                self._proxy.on_link(self, True)
            if not self._over:
                async with asyncio.TaskGroup() as group:
                    for lane in self._lanes.values():
                        self._tasks += [group.create_task(lane.read()), group.create_task(lane.write())]
        finally:
            self._end()

    def _asked(self, head: Head) -> None:
        upgrade = head.headers.get("upgrade", "").lower() == "websocket"
        self.request = f"{head.method} {head.target}" + (" upgrade" if upgrade else "")
        self.headers = head.headers
        if self._proxy.on_request is not None:
            self._proxy.on_request(self)

    def _seen(self, direction: Direction, count: int, note: str) -> None:
        if self._proxy.on_bytes is not None:
            self._proxy.on_bytes(self, direction, count, note)

    def _broken(self) -> None:
        if self.open:
            self.reset()

    def _ended(self) -> None:
        if all(lane.ended for lane in self._lanes.values()):
            self._linger()

    def _linger(self) -> None:
        if self.open:
            self._expiry = asyncio.get_running_loop().call_later(_LINGER, self._end)
            self._leave()

    def _end(self) -> None:
        self._over = True
        if self._expiry is not None:
            self._expiry.cancel()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        self._leave()

    def _leave(self) -> None:
        if self.open:
            self.open = False
            self._proxy.left(self)


class FaultProxy:
    """Listens on a loopback port and forwards to another one.

    Args:
        on_request: called with a link for every request on it, once its head is complete and before
            anything of it is forwarded, be the connection new or kept alive.
        on_bytes: called with a link, a direction, a count and a note at every write: `""` for bytes
            that were forwarded, `"swallowed"` for bytes that were not, and with no bytes `"fin"` and
            `"rst"`.
        on_link: called with a link when it has opened (`True`), and when it is no longer `open`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_request: Callable[[Link], None] | None = None,
        *,
        on_bytes: Callable[[Link, Direction, int, str], None] | None = None,
        on_link: Callable[[Link, bool], None] | None = None,
    ) -> None:
        self.on_request = on_request
        self.on_bytes = on_bytes
        self.on_link = on_link
        self.refusing = False
        """While set, connections are reset as soon as they are accepted."""
        self._upstream = (host, port)
        self._server: asyncio.Server | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._links: dict[int, Link] = {}

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    @property
    def links(self) -> list[Link]:
        """The links that are open, oldest first."""
        return list(self._links.values())

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)

    async def close(self) -> None:
        """Reset every link, whatever is done to it, and stop listening."""
        assert self._server is not None
        self._closed = True
        self._server.close()
        for link in self.links:
            link.reset()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def send_again(self, method: str, request: bytes) -> None:
        """Send a request to the server on a connection of its own, and throw the answer away."""
        self._spawn(self._exchange(method, request))

    def left(self, link: Link) -> None:
        """A link is no longer open."""
        del self._links[link.number]
        if self.on_link is not None:
            self.on_link(link, False)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing or self._closed:
            _reset(writer)
        else:
            task = self._spawn(self._serve(reader, writer))
            # It may be cancelled before there is a link, or before it has begun.
            task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection(*self._upstream, limit=CHUNK)
        except OSError:
            _reset(writer)
            return
        if writer.is_closing():  # the client did not wait
            _reset(server[1])
            return
        self._count += 1
        link = self._links[self._count] = Link(self._count, self, (reader, writer), server)
        await link.run()

    async def _exchange(self, method: str, request: bytes) -> None:
        answer = Messages("response", whole=False)
        answer.asked.append(method)
        with suppress(OSError):  # a timeout is one
            async with asyncio.timeout(_REPEAT):
                reader, writer = await asyncio.open_connection(*self._upstream, limit=CHUNK)
                try:
                    writer.write(request)
                    while data := await reader.read(CHUNK):
                        if any(part.last for part in answer.feed(data)):
                            return
                finally:
                    writer.transport.abort()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a callback of the fault proxy failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None:  # it may be closed already, of which each kind of loop tells in its own way
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()
