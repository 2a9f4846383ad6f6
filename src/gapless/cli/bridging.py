"""What `gapless bridge` does: lines of a host's pipes on one side, our client on the other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from gapless.cli.pipes import Pipes
from gapless.client.driver import Driver, Observation
from gapless.client.network import check_url, open_network
from gapless.client.sse import DEFAULT_LIMIT
from gapless.errors import (
    ConnectionGaveUpError,
    GaplessError,
    MalformedError,
    RefusedError,
    SessionEndedError,
    TooLargeError,
    UsageError,
)
from gapless.protocol.client import Client, Phase, Policy, Retry
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, one_line, peek, salvage
from gapless.protocol.lines import Lines, addressed
from gapless.protocol.moves import Failed, Input, Leave, Refused
from gapless.protocol.refusal import Reason

__all__ = ["Bridge"]

_RETRY: Final = Retry(attempts=360)
"""A desktop may be off the network for long: at ten seconds each, these are an hour at least."""
_AHEAD: Final = 32
"""Events that are read ahead of a host that does not take them."""
_FINISHING: Final = 5.0
"""Seconds for what is open to be answered once the host has closed stdin."""
_LINGERING: Final = 0.2
"""Seconds in which a host is told of the end for what it sends meanwhile."""
_FLUSHING: Final = 1.0
"""Seconds that a host may take to read what it was told last."""
_HINTS: Final = {
    "not-gapless": (
        "if it speaks standard Streamable HTTP, run gapless serve --upstream URL, and bridge to that"
    ),
    Reason.UNAUTHENTICATED: "if it wants credentials, give them with --header",
}

_SERVER_ERROR: Final = -32000
_INVALID_REQUEST: Final = -32600
_INTERNAL_ERROR: Final = -32603


class Bridge:
    """One session for one host; a message is carried as the bytes it is (W4).

    Args:
        headers: of every request, the handshake included.
        wait: seconds in which the session has to be opened.
        observe: called with everything that happens to the connection.

    Raises:
        UsageError: the URL is not http(s).
    """

    def __init__(
        self,
        url: str,
        pipes: Pipes,
        *,
        headers: Mapping[str, str],
        upgrade: Policy,
        wait: float,
        observe: Callable[[Observation], None] | None,
    ) -> None:
        self._url = check_url(url)
        self._pipes = pipes
        self._wait = wait
        self._network = open_network(self._url, {"headers": dict(headers)})
        process = secrets.token_urlsafe(12)
        self._driver = _Watched(
            Client(upgrade, process=process, retry=_RETRY, ahead=_AHEAD),
            self._url,
            process,
            self._network,
            deliver=pipes.write,
            over=self._over,
            saving=lambda stating: None,
            observe=observe,
        )
        self._lines = Lines(DEFAULT_LIMIT)
        self._taking: asyncio.Task[None] | None = None
        self.error: GaplessError | None = None
        """Why the session ended, if it did."""

    def leave(self) -> None:
        """Take nothing more from the host, and end the session."""
        if self._taking is not None:
            self._taking.cancel()

    async def run(self) -> None:
        """Carry messages until the host leaves, or the session ends: then `error` says why.

        Raises:
            OSError: stdout cannot be written.
        """
        self._taking = asyncio.create_task(self._take_all())
        driving = asyncio.create_task(self._driver.run())
        opening = asyncio.get_running_loop().call_later(self._wait, self._not_opened)
        try:
            await asyncio.wait({self._taking, driving}, return_when=asyncio.FIRST_COMPLETED)
            if driving.done():
                await asyncio.wait({self._taking}, timeout=_LINGERING)
            await self._driver.leave()
            await asyncio.wait({driving}, timeout=_FLUSHING)
        finally:
            opening.cancel()
            self._taking.cancel()
            driving.cancel()
            ends = await asyncio.gather(self._taking, driving, return_exceptions=True)
            await self._network.client.aclose()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, BrokenPipeError):
                raise end

    # From the host ------------------------------------------------------------------------------------

    async def _take_all(self) -> None:
        """Until the host has closed stdin, and has been answered as far as time allows."""
        while data := await self._pipes.read():
            if not self._lines.size:
                self._lines.limit = self._driver.machine.sending.limit or DEFAULT_LIMIT
            for line, size in self._lines.feed(data):
                await self._take(line, size)
        if self._lines.size:  # a script's last line may have no end
            await self._take(self._lines.rest, self._lines.size)
        await self._driver.opened()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FINISHING):
                await self._driver.answered()

    async def _take(self, line: bytes, size: int) -> None:
        try:
            if size > self._lines.limit:
                raise TooLargeError(f"{size} bytes, which is above the limit of {self._lines.limit}")
            line = one_line(line)
            if not line:
                return
            envelope = peek(line)
        except (MalformedError, TooLargeError) as error:
            await self._refuse(line, error)
            return
        try:
            await self._driver.submit(line, envelope)
        except UsageError as error:  # the ID of a request in flight
            await self._answer(envelope.id, str(error), Reason.DUPLICATE_ID)
            return
        if self._driver.machine.phase is Phase.OVER and envelope.kind is Kind.REQUEST:
            await self._pipes.write(self._not_sent(envelope.id))

    async def _refuse(self, line: bytes, error: GaplessError) -> None:
        """Answer a line that cannot be carried: to whoever waits for it, else to the host (W5)."""
        found = addressed(line) or salvage(line)
        if found is not None and found.kind is Kind.RESPONSE:
            told = f"unusable answer of the client: {error}"
            answer = error_response(found.id, _INTERNAL_ERROR, told, {"reason": error.code})
            await self._driver.submit(answer, Envelope(Kind.RESPONSE, id=found.id))
        else:
            id = None if found is None else found.id
            await self._answer(id, f"unusable message: {error}", error.code, _INVALID_REQUEST)

    async def _answer(self, id: RequestId | None, text: str, reason: str, code: int = _SERVER_ERROR) -> None:
        await self._pipes.write(error_response(id, code, text, {"reason": reason}))

    def _not_sent(self, id: RequestId | None) -> bytes:
        why = "the host left" if self.error is None else str(self.error)
        about = {"reason": "not-sent", "cause": "closed" if self.error is None else self.error.code}
        return error_response(id, _SERVER_ERROR, f"{why}; this was not sent", about)

    # The session --------------------------------------------------------------------------------------

    def _not_opened(self) -> None:
        if self._driver.machine.session is None and self._driver.machine.phase is not Phase.OVER:
            told = f"no session at {self._url} in {self._wait:g} seconds: {self._driver.trouble}"
            error = ConnectionGaveUpError(told, hint="is the server running, and reachable?")
            self._driver.put(Leave(error))

    def _over(self, error: GaplessError | None) -> None:
        self.error = error
        if isinstance(error, SessionEndedError):
            error.hint = "start the bridge again for a new session"
        elif isinstance(error, RefusedError) and error.code in _HINTS:
            self.error = RefusedError(f"{self._url}: {error}", code=error.code, hint=_HINTS[error.code])


class _Watched(Driver):
    """The driver, with what the bridge waits for, and what went wrong last."""

    trouble = "nothing is heard"

    def put(self, input: Input) -> None:
        match input:
            case Failed(_, message):
                self.trouble = message
            case Refused(_, status, _, _):
                self.trouble = f"it answered {status}"
            case _:
                pass
        super().put(input)

    async def opened(self) -> None:
        """Until there is a session, or it is over, or nobody wants one."""
        while self.machine.session is None and self.machine.phase is not Phase.OVER:
            if self.machine.phase not in (Phase.NEW, Phase.OPENING) and not self._owes:
                return  # it is not even being asked for now, so none is left behind
            await self._wait()

    async def answered(self) -> None:
        """Until the server has every message, and has answered every request; or it is over."""
        while self._owes and self.machine.phase is not Phase.OVER:
            await self._wait()

    @property
    def _owes(self) -> bool:
        outgoing = self.machine.outgoing
        return outgoing.kept > 0 or bool(outgoing.waiting)
