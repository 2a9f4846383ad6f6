"""The client transport for the official SDK: yields the stream pair that its sessions take.

The one place of the client that knows the SDK. Below it messages are bytes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Literal, cast

import anyio
import httpx2
import msgspec
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from gapless.client.driver import Driver, Observation
from gapless.client.identity import Identity
from gapless.client.network import Bearer, Token, check_url, open_network
from gapless.client.receipts import Receipts
from gapless.client.state import Saved, StateFile
from gapless.client.streams import Messages, Sink
from gapless.errors import GaplessError, MalformedError, UsageError
from gapless.protocol.client import Client, Policy, Retry
from gapless.protocol.cursor import parse_event_id
from gapless.protocol.incoming import read_object
from gapless.protocol.jsonrpc import Kind, error_response, peek

__all__ = ["Connection", "connect"]

_SAVE_SECONDS: Final = 1.0
_SAVE_EVENTS: Final = 64
_NEVER: Final = 2**63 - 1
"""The number of a message that the server does not have, and will not get."""

_TURN: Final = 32
"""Messages that are taken without a wait before other tasks get their turn."""

_Received = SessionMessage | Exception


def connect(
    url: str,
    *,
    upgrade: Policy = "auto",
    state: str | os.PathLike[str] | None = None,
    receipts: str | os.PathLike[str] | None = None,
    steps: Literal[1, 2] = 1,
    retry: Retry | None = None,
    observe: Callable[[Observation], None] | None = None,
    headers: dict[str, str] | None = None,
    token: Token | None = None,
    auth: httpx2.Auth | tuple[str, str] | None = None,
    verify: ssl.SSLContext | bool = True,
    proxy: str | None = None,
    trust_env: bool = True,
    answer_timeout: float = 10.0,
) -> Connection:
    """A transport to the Gapless server at `url`, for the official SDK's `Client` or `ClientSession`.

    Args:
        url: where the server's endpoints are mounted, such as `https://host/mcp`.
        upgrade: `auto` moves to a WebSocket when it can, `never` stays on SSE, `require` fails
            if the door cannot be passed.
        state: a file to go on from if this process dies; it is made with mode 0600.
        receipts: a file to append a line to for each event processed and each turn of the
            connection, for `gapless audit`; it is made with mode 0600, and holds no token.
        steps: how to go through the door: one step, or two (negotiated in band).
        retry: backoff; `Retry()` by default.
        observe: called with everything that happens, for display and diagnosis.
        token: a bearer token, or an async function that returns one: it is called for the first, and
            again whenever the server takes the last no more.
        headers, auth, verify, proxy, trust_env: as httpx2 takes them; the WebSocket gets the same. With
            the SDK's `OAuthClientProvider` as `auth`, a user authorizes as the server says.
        answer_timeout: seconds that any request, the handshake included, may go without an answer.

    Raises:
        UsageError: the URL is not http(s), `upgrade` is none of the three, or there are two credentials.
    """
    base = check_url(url)
    if upgrade not in ("auto", "never", "require"):
        raise UsageError(f"upgrade={upgrade!r} is not one of auto, never, require")
    options: dict[str, Any] = {"verify": verify, "trust_env": trust_env, "headers": headers}
    if token is not None and auth is not None:
        raise UsageError("both token and auth are given", hint="a token is a kind of auth: leave one out")
    if token is not None:
        auth = Bearer(token)
    if auth is not None:
        options["auth"] = auth
    if proxy is not None:
        options["proxy"] = proxy
    return Connection(base, upgrade, state, receipts, steps, retry, observe, options, answer_timeout)


class Connection:
    """One session's connection; enter it to get the SDK's `(read, write)` streams.

    On leaving, the session is ended with DELETE, and the state file is removed: a state file
    outlives only a process that died.
    """

    def __init__(
        self,
        url: str,
        upgrade: Policy,
        state: str | os.PathLike[str] | None,
        receipts: str | os.PathLike[str] | None,
        steps: Literal[1, 2],
        retry: Retry | None,
        observe: Callable[[Observation], None] | None,
        options: dict[str, Any],
        answer_timeout: float,
    ) -> None:
        self.url = url
        self._recovered: list[dict[str, Any]] = []
        self._dead: dict[str, int] = {}
        self._answered: set[str] = set()
        """Questions of the server that this process has answered. Until it has that, a successor may have
        to answer."""
        self._upgrade: Policy = upgrade
        self._steps: Literal[1, 2] = steps
        self._retry = retry
        self._observe = observe
        self._options = options
        self._answer_timeout = answer_timeout
        self._file = None if state is None else StateFile(state)
        self._receipts_path = receipts
        self._receipts: Receipts | None = None
        self._saved: Saved | None = None
        self._saved_at = 0.0
        self._saved_seq = -1
        self._dirty = False
        self._identity = Identity(0)
        self._driver: Driver | None = None
        self._http: httpx2.AsyncClient | None = None
        self._running: asyncio.Task[None] | None = None
        self._streams = Messages(self._receive), Sink(self._send)
        self._turn = 0
        self._initializing: Any = None
        self.error: GaplessError | None = None
        """Why the session ended, if it did."""

    # What a caller may ask ---------------------------------------------------------------------------

    @property
    def session(self) -> str | None:
        """The session's token: whoever knows it has the session."""
        return None if self._driver is None else self._driver.machine.session

    @property
    def cursor(self) -> int:
        """The last event that the application has processed."""
        cursor = None if self._driver is None else self._driver.machine.cursor
        return 0 if cursor is None else cursor.seq

    @property
    def committed(self) -> int:
        """The server's position as last heard of; never a cursor (C2)."""
        return 0 if self._driver is None else self._driver.machine.committed

    @property
    def transport(self) -> str:
        """What carries events now: `sse`, `websocket` or `none`."""
        return "none" if self._driver is None else self._driver.machine.transport

    @property
    def recovered(self) -> list[dict[str, Any]]:
        """Answers to requests of a process that died, as JSON-RPC messages, in the order they came.

        A request that died with its process before the server had it is answered here too, with
        an error whose `data.reason` is `not-sent`.
        """
        told = None if self._driver is None else self._driver.machine.sending.told
        for key, number in list(self._dead.items()):
            if told is not None and number > told:
                del self._dead[key]
                text = "the process died before the server had this request: it was not run"
                error = {"code": -32000, "message": text, "data": {"reason": "not-sent"}}
                self._recovered.append({"jsonrpc": "2.0", "id": msgspec.json.decode(key), "error": error})
        return self._recovered

    def migrate(self) -> None:
        """Move to a WebSocket now, whatever `upgrade` says; without effect where there already is one."""
        if self._driver is not None:
            self._driver.move()

    # The SDK's side -----------------------------------------------------------------------------------

    async def __aenter__(
        self,
    ) -> tuple[Messages[_Received], Sink[SessionMessage]]:
        self._resume()
        if self._receipts_path is not None:
            self._receipts = Receipts(self._receipts_path)
        network = open_network(self.url, self._options, self._answer_timeout)
        self._http = network.client
        process = secrets.token_urlsafe(12)
        self._driver = Driver(
            self._machine(process),
            self.url,
            process,
            network,
            over=self._over,
            saving=self._save,
            observe=self._observe,
            receipts=self._receipts,
        )
        if self._saved is not None:
            for asked in self._saved.asked.values():
                self._driver.tell(msgspec.json.encode(asked))  # of the dead process, never answered
        self._running = asyncio.create_task(self._driver.run())
        return self._streams

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._driver is not None and self._http is not None and self._running is not None
        await self._driver.leave()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for stream in self._streams:
            stream.close()
        await self._http.aclose()
        if self._receipts is not None:
            self._receipts.close()

    def _machine(self, process: str) -> Client:
        saved = self._saved
        if saved is None:
            return Client(self._upgrade, steps=self._steps, process=process, retry=self._retry)
        machine = Client(
            self._upgrade,
            steps=self._steps,
            process=process,
            retry=self._retry,
            session=saved.session,
            cursor=parse_event_id(saved.cursor),
        )
        machine.limits = saved.limits
        machine.keepalive = float(saved.timers.get("keepalive", machine.keepalive))
        return machine

    async def _receive(self) -> _Received:
        """What the SDK's session takes next; it has it then, for nothing awaits in between."""
        assert self._driver is not None
        while True:
            if self._turn == _TURN:
                self._turn = 0
                await asyncio.sleep(0)
            data = await self._driver.next()
            if data is None:
                raise anyio.EndOfStream
            self._turn += 1
            try:
                item = self._for_app(data)
            except UsageError as error:
                self._driver.fail(error)
                continue
            self._driver.accepted()
            if item is not None:
                return item

    def _for_app(self, data: bytes) -> _Received | None:
        """A message off the wire, as the application is to see it; `None` where it is not."""
        if self._file is None and not self._identity:
            return _parse(data)
        try:
            message = read_object(data)
        except MalformedError:
            return _parse(data)
        if self._belongs_elsewhere(message):
            self._dead.pop(_id_key(message.get("id")), None)
            self._recovered.append(message)
            return None
        if self._reports_elsewhere(message):
            return None
        self._note_incoming(message)
        return _parse(msgspec.json.encode(self._identity.incoming(message)))

    async def _send(self, item: SessionMessage) -> None:
        """Take a message from the application and give it to the machine."""
        assert self._driver is not None
        if self._driver.over:
            raise anyio.BrokenResourceError
        data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        if self._file is not None or self._identity:
            message: dict[str, Any] = msgspec.json.decode(data)
            answer = self._from_record(message)
            if answer is not None:
                if answer:
                    self._driver.tell(answer)
                return
            self._note_outgoing(message)
            data = msgspec.json.encode(self._identity.outgoing(message))
        envelope = peek(data)
        await self._driver.submit(data, envelope)
        if self._file is not None and envelope.kind is Kind.RESPONSE and envelope.id is not None:
            self._answered.add(_id_key(envelope.id))
        if self._driver.over:
            raise anyio.BrokenResourceError

    def _over(self, error: GaplessError | None) -> None:
        self.error = self.error or error
        if self._file is not None:
            self._file.discard()
            self._file = self._saved = None  # what is still handed over must not bring it back

    # State, and going on from it -------------------------------------------------------------------------

    def _resume(self) -> None:
        if self._file is None:
            return
        self._saved = self._file.load(self.url)
        if self._saved is None:
            return
        self._saved.incarnation += 1
        self._dead = dict(self._saved.waiting)
        self._identity = Identity(self._saved.incarnation)
        self._file.save(self._saved)  # before anything is sent: the next process must not use our marks
        self._saved_seq = parse_event_id(self._saved.cursor).seq

    def _save(self, stating: bool) -> None:
        """Save the cursor: always before it is stated (C4), else each second or 64 events."""
        if self._file is None or self._driver is None:
            return
        machine = self._driver.machine
        if machine.cursor is None or machine.session is None:
            return
        moved = machine.cursor.seq - self._saved_seq
        now = time.monotonic()
        lost = self._lost()
        due = stating or lost or moved >= _SAVE_EVENTS or now - self._saved_at >= _SAVE_SECONDS
        if not due or not (moved or lost or self._dirty):
            return
        if self._saved is None:
            self._saved = Saved(self.url, machine.session, "", limits=machine.limits)
            self._saved.timers = {"keepalive": machine.keepalive}
        self._saved.cursor = str(machine.cursor)
        self._saved.waiting = {**self._dead, **{_id_key(id): n for id, n in machine.outgoing.waiting.items()}}
        heard = self._answered - set(map(_id_key, machine.outgoing.answers))
        self._answered -= heard
        for key in heard:
            self._saved.asked.pop(key, None)
        if self._receipts is not None:
            self._receipts.flush()  # or the next process would go on after events without a receipt
        self._file.save(self._saved)
        self._saved_at, self._saved_seq, self._dirty = now, machine.cursor.seq, bool(self._answered)

    def _lost(self) -> bool:
        """Whether it turned out just now that requests died with their process before the server had them.

        Their numbers will be other messages': before one of these goes out, the file has to know.
        """
        assert self._driver is not None
        told = self._driver.machine.sending.told
        lost = [key for key, number in self._dead.items() if told is not None and told < number < _NEVER]
        self._dead.update(dict.fromkeys(lost, _NEVER))
        return bool(lost)

    def _from_record(self, message: dict[str, Any]) -> bytes | None:
        """Answer the handshake of a restarted process from the record; `b""` swallows, `None` passes on.

        The answer is as it would come off the wire.
        """
        saved = self._saved
        if saved is None or saved.initialize is None or saved.initialized is None or not saved.incarnation:
            return None
        if message.get("method") == "notifications/initialized":
            return b""
        if message.get("method") != "initialize":
            return None
        if _handshake(message) != _handshake(saved.initialize):
            text = (
                "the session in the state file was opened with other client capabilities or another version"
            )
            return error_response(
                self._identity.mark(message["id"]),
                -32000,
                text,
                {"reason": "handshake-differs", "action": "delete the state file"},
            )
        id, result = self._identity.mark(message["id"]), saved.initialized["result"]
        return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": result})

    def _note_outgoing(self, message: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._dirty = True
        if message.get("method") == "initialize":
            self._initializing = dict(message)

    def _note_incoming(self, message: dict[str, Any]) -> None:
        if self._file is None:
            return
        started = self._initializing
        if self._saved is None:
            self._save(True)
        if self._saved is None:
            return
        if started is not None and message.get("id") == started["id"] and "result" in message:
            self._saved.initialize, self._saved.initialized = started, message
            self._initializing = None
        elif "method" in message and "id" in message:
            self._saved.asked[_id_key(message["id"])] = message
        elif message.get("method") == "notifications/cancelled":
            params = cast("dict[str, Any]", message.get("params") or {})
            self._saved.asked.pop(_id_key(params.get("requestId")), None)
        self._dirty = True

    def _belongs_elsewhere(self, message: dict[str, Any]) -> bool:
        """Whether this answers a request of a process that died (N3)."""
        return "method" not in message and not self._identity.owns(message.get("id"))

    def _reports_elsewhere(self, message: dict[str, Any]) -> bool:
        """Whether this reports progress on a request of a process that died: nobody waits for it (N3)."""
        if message.get("method") != "notifications/progress":
            return False
        params = cast("dict[str, Any]", message.get("params") or {})
        return not self._identity.owns(params.get("progressToken"))


def _parse(data: bytes) -> _Received:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValidationError as error:
        return error


def _handshake(message: dict[str, Any]) -> Any:
    params = cast("dict[str, Any]", message.get("params") or {})
    return params.get("capabilities"), params.get("protocolVersion")


def _id_key(id: Any) -> str:
    return msgspec.json.encode(id).decode()
