"""WebSocket handshakes that cannot be read, which uvicorn leaves unanswered."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gapless.protocol.refusal import Reason, Refusal

__all__ = ["Handshakes"]

_REFUSED: Final = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


class Handshakes(WebSocketsSansIOProtocol):
    """Refuses what is no handshake (a header line above 8 KiB, say) as `malformed`."""

    def data_received(self, data: bytes) -> None:
        """Read on, and refuse once nothing more can be read."""
        super().data_received(data)
        error = self.conn.handshake_exc
        if error is not None and not self.handshake_initiated and not self.transport.is_closing():
            body = Refusal(Reason.MALFORMED, f"the handshake cannot be read: {error}").body()
            self.transport.write(_REFUSED % (len(body), body))
            self.transport.close()
