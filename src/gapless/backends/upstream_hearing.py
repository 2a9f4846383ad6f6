"""What an upstream server says, on whichever stream, on its way to the session."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from gapless.backends.base import Sink
from gapless.backends.modern import Modern
from gapless.backends.upstream import Upstream
from gapless.backends.upstream_call import Call, settled_version, under
from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, one_line, peek
from gapless.protocol.lines import addressed
from gapless.protocol.refusal import Reason

__all__ = ["Hearing"]

_INVALID_REQUEST: Final = -32600
_INTERNAL_ERROR: Final = -32603


class Hearing:
    """Hands over each message once: an answer only to a call that is open.

    Args:
        answer: called with what is to be sent to the server in place of the client's answer.

    Attributes:
        calls: the requests that are open.
        over: nothing is handed over any more.
    """

    def __init__(
        self,
        upstream: Upstream,
        sink: Sink,
        modern: Modern,
        answer: Callable[[bytes, Envelope], object],
        log: logging.Logger,
    ) -> None:
        self.calls: dict[RequestId, Call] = {}
        self.over = False
        self._upstream = upstream
        self._sink = sink
        self._modern = modern
        self._answer = answer
        self._log = log

    def open(self, call: Call) -> bool:
        """Whether a call is still to be answered."""
        return self.calls.get(call.id) is call

    async def hear(self, data: bytes, call: Call | None) -> None:
        """A message came, on the stream of `call` or on the standalone one."""
        try:
            line = one_line(data)
            envelope = peek(line)
        except MalformedError as error:
            await self._refuse(data, str(error))
            return
        if envelope.kind is not Kind.RESPONSE:
            await self._emit(line, envelope, None if call is None else call.id)
            return
        answered = call if envelope.id is None else self.calls.get(envelope.id)
        if answered is None:
            return  # late, or repeated
        if envelope.id is None:
            line = under(answered.id, line)
        if answered.initialize:
            self._upstream.version = settled_version(line)
        elif answered.method == "tools/list" and answered.modern is not None:
            self._modern.learn(line)
        await self.settle(answered, line)
        if answered is not call:
            answered.task.cancel()

    async def settle(self, call: Call, line: bytes) -> None:
        """Answer a call, unless it was answered."""
        if self.open(call):
            del self.calls[call.id]
            await self._emit(line, Envelope(Kind.RESPONSE, id=call.id), None)

    async def settle_large(self, call: Call, error: TooLargeError) -> None:
        """Answer a call in place of a message above the limit (W5)."""
        text = f"the MCP server's message: {error}"
        data = {"reason": Reason.TOO_LARGE.value}
        await self.settle(call, error_response(call.id, _INTERNAL_ERROR, text, data))

    async def _refuse(self, data: bytes, trouble: str) -> None:
        """Answer in place of a message that nobody may see (W4); one that nobody awaits is dropped."""
        self._log.warning("%s: a message that cannot be used: %s", self._upstream.name, trouble)
        refused = addressed(data)
        if refused is None or refused.id is None:
            return
        if refused.kind is Kind.REQUEST:
            answer = error_response(refused.id, _INVALID_REQUEST, f"unusable request: {trouble}")
            self._answer(answer, Envelope(Kind.RESPONSE, id=refused.id))
        elif (call := self.calls.get(refused.id)) is not None:
            text = f"unusable answer of the MCP server: {trouble}"
            await self.settle(call, error_response(call.id, _INTERNAL_ERROR, text))

    async def _emit(self, line: bytes, envelope: Envelope, related: RequestId | None) -> None:
        if not self.over:
            full = self._sink.emit(line, envelope, related)
            if full is not None:
                await full
