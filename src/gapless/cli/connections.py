"""Connections as uvicorn takes them, and what it leaves open: sizes, timeouts, and refusals with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Request

from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.settings import Limits

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

__all__ = ["Handshakes", "Requests"]

_STATUS: Final = {
    400: b"400 Bad Request",
    408: b"408 Request Timeout",
    414: b"414 URI Too Long",
    431: b"431 Request Header Fields Too Large",
    503: b"503 Service Unavailable\r\nRetry-After: 1",
}
_LINGER: Final = 1.0
"""Seconds that a refused peer has to read why."""
_REFUSED: Final = (
    b"HTTP/1.1 %b\r\nConnection: close\r\nCache-Control: no-store\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


def _refuse(transport: asyncio.Transport, refusal: Refusal) -> None:
    """Refuse, and leave the peer time to read that: what it still sends would have it reset."""
    body = refusal.body()
    transport.write(_REFUSED % (_STATUS[refusal.status], len(body), body))
    if transport.can_write_eof():
        transport.write_eof()
    asyncio.get_running_loop().call_later(_LINGER, transport.close)


class Requests(HttpToolsProtocol):
    """HTTP/1.1: refuses what is no request, and what is too large, too slow or too much (§8).

    Whoever sends what cannot be read while a request of theirs is being answered is cut off: a
    refusal in the middle of an answer would be taken for a part of it.
    """

    __slots__ = ("_answering", "_began", "_head", "_limits", "_most", "_over", "_overdue", "_refused")

    def __init__(
        self,
        limits: Limits,
        most: int,
        refused: Callable[[Reason], None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._most = most
        self._refused = refused
        self._over = False
        """Whether what comes is not read any more."""
        self._head: int | None = None
        """Bytes that have come of headers that are not whole, without those they began among."""
        self._began = False
        self._overdue: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        """The latest request whose answer has begun; `cycle` is the latest that has come."""
        self.url = b""

    @property
    def _answered(self) -> bool:
        """Whether every request so far has its whole answer."""
        return not self.pipeline and (self._answering is None or self._answering.response_complete)

    # The connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection: refused where there are too many; else its headers are to come soon."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self.connections.discard(self)  # else those that are refused would keep others out
            self._refuse(Refusal(Reason.LIMIT, f"{self._most} connections are open"))
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, and what is being answered has to know, with requests behind it or without."""
        self._in_time()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read on, as long as nothing that comes is too large."""
        if self._over:
            return
        self._began = False
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            return  # a socket now
        if self._head is not None:
            self._head += 0 if self._began else len(data)
            if self._head > self._limits.max_header_bytes:
                self._too_large()
            elif self._overdue is None:
                self._hurry()  # headers that come as a whole, as nearly all do, need no timer
        elif self._overdue is None and self._answered:
            self._await_headers()  # blank lines, say, of which the parser does not tell

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as if no upgrade were asked for. What follows cannot be read: that answer is the last."""
        if not self._over:
            self.cycle.keep_alive = False

    def handle_websocket_upgrade(self) -> None:
        """Go over to a socket, unless refused; what is still being answered would be written into it."""
        if self._over:
            return
        if self._answered:
            super().handle_websocket_upgrade()
        else:
            self._refuse(Refusal(Reason.MALFORMED, "a handshake waits for the answers before it"))

    def send_400_response(self, msg: str) -> None:
        """What came is no request."""
        self._refuse(Refusal(Reason.MALFORMED, "this is no HTTP request"))

    # What the parser tells -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._began = True
        if not self._over:
            self._in_time()
            self._head = 0

    def on_headers_complete(self) -> None:
        """Headers are whole."""
        if self._over:  # refused, and this came along with what was
            return
        self._head = None
        self._in_time()
        if self.parser is not None and self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(Refusal(Reason.MALFORMED, "this is HTTP/1.1"))
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes or self._long():
            self._too_large()
        else:
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Some of a body."""
        if not self._over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        if not self._over:
            self._in_time()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered; one that is not whole by then has to become so in time."""
        super().on_response_complete()
        if self._answered and self.cycle.more_body and not self.transport.is_closing():
            self._in_time()
            self._overdue = self.loop.call_later(self._limits.body_timeout, self.transport.close)

    # Limits --------------------------------------------------------------------------------------

    def _await_headers(self) -> None:
        self._head = 0
        self._hurry()

    def _hurry(self) -> None:
        self._in_time()
        self._overdue = self.loop.call_later(self._limits.header_timeout, self._too_slow)

    def _in_time(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _too_slow(self) -> None:
        if not self._answered:  # it has nothing to hurry for
            self._hurry()
            return
        text = f"the headers did not come within {self._limits.header_timeout:g} s"
        self._refuse(Refusal(Reason.REQUEST_TIMEOUT, text))

    def _long(self) -> bool:
        return len(self.url) > self._limits.max_url_bytes

    def _too_large(self) -> None:
        limits = self._limits
        if self._long():
            refusal = Refusal(Reason.URL_TOO_LONG, f"the URL is longer than {limits.max_url_bytes} bytes")
        else:
            text = f"the headers are larger than {limits.max_header_bytes} bytes"
            refusal = Refusal(Reason.HEADERS_TOO_LARGE, text)
        self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        if self._over:
            return
        self._over = True
        self._in_time()
        if self._answered and not self.transport.is_closing():
            self._refused(refusal.reason)
            _refuse(self.transport, refusal)
        else:
            self.transport.close()


class Handshakes(WebSocketsSansIOProtocol):
    """WebSocket: refuses what is no handshake (a header line above 8 KiB, say); uvicorn says nothing."""

    def __init__(self, refused: Callable[[Reason], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = refused
        self._over = False

    def handle_connect(self, event: Request) -> None:
        """Take a handshake, or refuse it."""
        response = self.conn.accept(event)
        if response.status_code == 101:
            super().handle_connect(event)
            return
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self._refuse(f"the handshake cannot be accepted: {response.body.decode(errors='replace').strip()}")

    def handle_parser_exception(self) -> None:
        """Close; before the 101 there is no close frame to say so with."""
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
            return
        self.close_sent = self._over = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1002})
        self.transport.close()

    def send_receive_event_to_app(self) -> None:
        """Hand over a message; one that is not UTF-8 closes, which is no error of ours to log."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                if self.conn.close_sent is None:
                    self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def data_received(self, data: bytes) -> None:
        """Read on, and refuse once nothing more can be read."""
        if self._over:
            return
        super().data_received(data)
        error = self.conn.handshake_exc
        if error is not None and not self.handshake_initiated and not self.transport.is_closing():
            self._refuse(f"the handshake cannot be read: {error}")

    def _refuse(self, text: str) -> None:
        self._over = True
        self._refused(Reason.MALFORMED)
        _refuse(self.transport, Refusal(Reason.MALFORMED, text))
