"""A client of standard Streamable HTTP, by hand: it resumes as patiently as anyone could.

What it does not receive, no client of that server could have received.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import Any, Final, Self

import httpx2
import msgspec

from gapless.errors import TargetError
from gapless.protocol.refusal import read_refusal
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Account, Climb, Ledger
from gapless.torture.reading import ANSWER, ASKED, IDLE, Answer, http_client, json_object, message_of
from gapless.torture.trial import Trace

__all__ = ["QUIET", "StandardSession", "Stream"]

_PROTOCOL: Final[str] = INITIALIZE["params"]["protocolVersion"]

_PATIENCE: Final = 8
"""Resumes in a row that may bring nothing."""
_BACKOFF: Final = 0.02
_NOBODY: Final = 0.1
"""Seconds after which one asks again where nobody listens."""

QUIET: Final = 6.0
"""Seconds of quiet that mean the end: more than a resume may go without being answered, or dropped."""

_BOTH: Final = "application/json, text/event-stream"


class Stream:
    """One event stream as it goes on over several connections.

    Attributes:
        number: tells streams apart; 0 is the standalone one.
        first: the ID of its first message.
        given: the IDs of all its messages, in the order of their arrival.
        cut: whether its first connection broke.
        last: the ID of the last block that had one; the cursor.
        fruitless: resumes in a row that brought no message.
        end: how the latest of them ended: `ended` in good order, `silent`, or `refused`.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.first: str | None = None
        self.given: list[str] = []
        self.cut = False
        self.last: str | None = None
        self.fruitless = 0
        self.end = ""


class StandardSession:
    """One session of a standard client.

    Attributes:
        received: called with the count of messages whenever one has been received.
        resumes: how many GETs with a cursor were made, not counting those in vain that others follow.
        unresumable: calls that were cut before anything came: no server could help that. Not among them
            are calls whose stream has messages and no IDs.
        streams: each call's stream, by the call's ID.
        ids: every event ID that their streams and the standalone one were given.
        ended: why the session is over, if a 404 has said so in the words of our protocol.
    """

    def __init__(self, url: str, trace: Trace) -> None:
        self.url = url
        self.trace = trace
        self.ledger = Ledger()
        self.token: str | None = None
        self.standalone = Stream()
        self.streams: dict[int, Stream] = {}
        self.ids: set[str] = set()
        self.ended = ""
        self.unresumable = 0
        self.resumes = 0
        self.received: Callable[[int], None] = lambda count: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._http = http_client()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0), self.send("DELETE") if self.token is not None else nullcontext():
                pass
        except (httpx2.HTTPError, TimeoutError):
            pass  # it expires
        finally:
            await self._http.aclose()

    # Requests -----------------------------------------------------------------------------------------

    def _headers(self, cursor: str | None = None) -> dict[str, str]:
        headers = {"Accept": _BOTH, "Mcp-Protocol-Version": _PROTOCOL}
        if self.token is not None:
            headers["Mcp-Session-Id"] = self.token
        if cursor is not None:
            headers["Last-Event-ID"] = cursor
        return headers

    @asynccontextmanager
    async def send(
        self, method: str, message: dict[str, Any] | None = None, cursor: str | None = None
    ) -> AsyncGenerator[Answer]:
        """One request, and its answer as far as its head.

        Raises:
            httpx2.HTTPError: the connection broke.
            TimeoutError: no answer began within 5 s.
        """
        headers = httpx2.Headers(self._headers(cursor), encoding="utf-8")  # IDs are what the server likes
        content = b""
        if message is not None:
            headers["Content-Type"] = "application/json"
            content = msgspec.json.encode(message)
        request = self._http.build_request(method, self.url, headers=headers, content=content)
        async with asyncio.timeout(ANSWER):
            response = await self._http.send(request, stream=True)
        async with aclosing(response):
            self.token = response.headers.get("mcp-session-id", self.token)
            yield Answer(response)

    async def open(self) -> None:
        """Initialize.

        Raises:
            TargetError: it does not speak MCP.
        """
        await self.ask(INITIALIZE)
        await self.tell(INITIALIZED)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """A request and its answer, without faults in between.

        Raises:
            TargetError: there is none.
        """
        what = f"{message['method']} at {self.url}"
        try:
            async with asyncio.timeout(ASKED), self.send("POST", message) as answer:
                if answer.status != 200:
                    raise TargetError(f"{what} is answered {answer.status}")
                if not answer.streams:
                    found = json_object(await answer.body())
                    if found is not None:
                        return found
                    raise TargetError(f"{what} is answered something that is no JSON object")
                async with aclosing(answer.blocks(ASKED)) as blocks:
                    async for block in blocks:
                        found = message_of(block)
                        if found is not None and found.get("id") == message["id"]:
                            return found
        except (httpx2.HTTPError, TimeoutError) as error:
            raise TargetError(f"{what}: {str(error) or type(error).__name__}") from None
        raise TargetError(f"{what} got no answer")

    async def tell(self, message: dict[str, Any]) -> None:
        """Send a notification or a response; again and again for some seconds, if the wire breaks."""
        for attempt in range(_PATIENCE):
            try:
                async with self.send("POST", message) as answer:
                    await answer.body()
                    return
            except (httpx2.HTTPError, TimeoutError):
                await asyncio.sleep(_BACKOFF * 2**attempt)

    # Streams ------------------------------------------------------------------------------------------

    def start(self, climb: Climb, id: int) -> Account:
        """Begin a climb; its account fills as messages come."""
        account = self.ledger.start(climb, id)
        self._spawn(self._climb(account))
        return account

    async def listen(self, *, lasting: bool = False) -> bool:
        """Open the standalone stream and keep it; `False` if the server has none.

        Args:
            lasting: it is kept when all calls are complete, too, for more will be made.

        Raises:
            TargetError: the request is not answered.
        """
        ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._spawn(self._standalone(ready, (lambda: False) if lasting else lambda: self.ledger.complete))
        return await ready

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _climb(self, account: Account) -> None:
        stream = self.streams[account.id] = Stream(account.id)
        try:
            async with self._begin(account.climb.request(account.id)) as answer:
                if answer.streams:
                    await self._read(stream, answer)
                else:
                    told = json_object(await self._body(answer))
                    told = told or {"error": {"message": f"status {answer.status}, and no JSON object"}}
                    self._take({**told, "id": account.id}, stream)
        except (httpx2.HTTPError, TimeoutError) as error:
            stream.cut = True
            self.trace.note("client", f"call {account.id}: {type(error).__name__}")
        if account.result is None and stream.last is None:
            self.unresumable += stream.cut and stream.number not in account.streams
            told = {"message": "the call's stream ended before it had an ID to resume from"}
            self._take({"id": account.id, "error": told}, stream)
        await self._resume(stream, lambda: account.result is not None)

    @asynccontextmanager
    async def _begin(self, call: dict[str, Any]) -> AsyncGenerator[Answer]:
        """POST a call: where nobody listens it cannot have arrived, and is sent again, for some seconds.

        Raises:
            httpx2.HTTPError: the connection broke; the call may have arrived.
            TimeoutError: no answer began within 5 s.
        """
        deadline = asyncio.get_running_loop().time() + ASKED
        while True:
            async with AsyncExitStack() as stack:
                try:
                    answer = await stack.enter_async_context(self.send("POST", call))
                except httpx2.ConnectError:
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                else:
                    yield answer
                    return
            await asyncio.sleep(_NOBODY)

    async def _body(self, answer: Answer) -> bytes:
        """The body of an answer that is no stream, which may say that the session is over."""
        body = await answer.body()
        refusal = read_refusal(body) if answer.status == 404 else None
        if refusal is not None:
            self.ended = refusal.reason.value
            self._changed.set()
        return body

    async def _standalone(self, ready: asyncio.Future[bool], done: Callable[[], bool]) -> None:
        stream = self.standalone
        try:
            async with self.send("GET") as answer:
                ready.set_result(answer.streams)
                if not answer.streams:
                    return
                await self._read(stream, answer)
        except (httpx2.HTTPError, TimeoutError) as error:
            if not ready.done():
                told = f"GET {self.url}: {str(error) or type(error).__name__}"
                ready.set_exception(TargetError(told))
                return
        await self._resume(stream, done)

    async def _resume(self, stream: Stream, done: Callable[[], bool]) -> None:
        """Resume until it is done, or resuming brings nothing any more."""
        while not done() and stream.fruitless < _PATIENCE:
            await asyncio.sleep(_BACKOFF)
            self.resumes += stream.fruitless == 0
            stream.fruitless += 1
            self._changed.set()
            self.trace.note("client", f"resumes from {stream.last}")
            try:
                async with self.send("GET", cursor=stream.last) as answer:
                    if answer.streams:
                        await self._read(stream, answer)
                        stream.end = "ended"
                    else:
                        stream.end = "refused"
                        await self._body(answer)
                        self.trace.note("client", f"refused: {answer.status}")
            except TimeoutError:
                self.trace.note("client", f"nothing for {IDLE:.0f} s: drops the stream")
                stream.end = "silent"
                stream.fruitless += 1  # it takes the longest
            except httpx2.HTTPError as error:
                self.trace.note("client", f"cut: {type(error).__name__}")
                if isinstance(error, httpx2.ConnectError):
                    await asyncio.sleep(_NOBODY)
                stream.fruitless = max(0, stream.fruitless - 1)  # that is the wire's fault

    async def _read(self, stream: Stream, answer: Answer) -> None:
        async with aclosing(answer.blocks()) as blocks:
            async for block in blocks:
                if block.id:
                    stream.last = block.id
                    self.ids.add(block.id)
                message = message_of(block)
                if message is not None:
                    stream.fruitless = 0
                    stream.first = stream.first or block.id
                    stream.given.append(block.id or "")
                    self.trace.note("event", f"{block.id} {message.get('method', 'answer')}")
                    self._take(message, stream)

    def _take(self, message: dict[str, Any], stream: Stream) -> None:
        reply = self.ledger.take(message, stream.number)
        if reply is not None:
            self._spawn(self.tell(reply))
        self._changed.set()
        self.received(self.ledger.count)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, the session is over, or time is up; whether it is so."""
        try:
            async with asyncio.timeout(seconds):
                while not condition() and not self.ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return condition()

    async def finish(self, quiet: float, most: float) -> None:
        """Wait until every climb is complete, or nothing more can come, `most` seconds at most.

        Nothing more can come once every stream was given up; nor, as far as anybody can tell, once all
        calls are answered, and for `quiet` seconds nothing came and nothing was resumed.
        """
        deadline = asyncio.get_running_loop().time() + most
        while self._tasks and not self.ledger.complete:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(
                    min(deadline, now + quiet) if self.ledger.answered else deadline
                ):
                    await self._changed.wait()
            except TimeoutError:
                return
