"""OpenTelemetry spans: one for each request of a client, one for each upgrade.

Requests follow OpenTelemetry's semantic conventions for MCP; a request's parent is the trace context in
its `params._meta`. What a client sent reaches the MCP server as it is, that context included.

Nobody imports this module unless OpenTelemetry is imported already: it need not be installed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from opentelemetry.context import get_current
from opentelemetry.propagate import extract
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    get_tracer_provider,
)

from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import (
    Acked,
    Dropped,
    Effect,
    Emitted,
    Handshake,
    Input,
    Lost,
    Message,
    Offered,
    Refused,
    Serving,
    Upgrade,
)
from gapless.protocol.jsonrpc import Envelope, RequestId
from gapless.protocol.session import Session

__all__ = ["Spans", "spans"]

_log: Final = logging.getLogger("gapless.tracing")
_MOST: Final = 256
"""Characters of an attribute that a client or an MCP server chooses."""
_REVISION: Final = "io.modelcontextprotocol/protocolVersion"
_UNANSWERED: Final = "-32000"
"""The JSON-RPC error that a client is told of a request which we settle (L7)."""


class _Params(msgspec.Struct):
    name: Any = None
    uri: Any = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="_meta")


class _Asked(msgspec.Struct):
    params: _Params


class _Error(msgspec.Struct):
    code: Any = None
    message: Any = None


class _Result(msgspec.Struct):
    isError: Any = None
    protocolVersion: Any = None


class _Answer(msgspec.Struct):
    error: _Error | None = None
    result: _Result | None = None


_asked: Final = msgspec.json.Decoder(_Asked)
_answer: Final = msgspec.json.Decoder(_Answer)


def spans(session: str, machine: Session) -> Spans | None:
    """What makes the spans of a session; `None` while no tracer provider is set."""
    provider = get_tracer_provider()
    if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider):
        return None
    return Spans(provider.get_tracer("gapless"), session, machine)


class Spans:
    """The spans of one session: at most one for each open request, and one for its upgrade.

    Nothing raises: what a span processor throws is logged, and is the end of this session's spans.
    """

    def __init__(self, tracer: Tracer, session: str, machine: Session) -> None:
        self._tracer = tracer
        self._session = session
        self._machine = machine
        self._received = machine.inbox.received
        self._revision: str | None = None
        self._open: dict[RequestId, tuple[Span, str]] = {}
        self._settled: deque[tuple[int, Span]] = deque()
        """By the version of the session that the log has to have before they end."""
        self._upgrade: Span | None = None
        self._socket: ConnectionId | None = None
        """The connection that the upgrade has bound."""
        self._broken = False

    def saw(self, input: Input, effects: list[Effect], version: int) -> None:
        """The machine has taken an input, of which these are the effects; it is at `version` now."""
        if self._broken:
            return
        with self._guarded():
            if isinstance(input, Message):
                self._take(input)
            else:
                self._follow(input, effects)
            for id in self._open.keys() - self._machine.inbox.open.keys():
                span, method = self._open.pop(id)
                self._settled.append((version, span))
                self._settle(span, method, input)
            if self._machine.reason is not None:
                self._conclude(self._machine.reason.value)

    def durable(self, version: int) -> None:
        """The log has everything up to `version`: what was settled by then may be told."""
        with self._guarded():
            while self._settled and self._settled[0][0] <= version:
                self._settled.popleft()[1].end()

    def close(self) -> None:
        """This process serves the session no more: nothing stays open. Whoever goes on with it settles it."""
        if self._broken:
            return
        with self._guarded():
            for span in (*(span for span, _ in self._open.values()), *(span for _, span in self._settled)):
                _fail(span, "abandoned", "this process serves the session no more")
                span.end()
            self._open.clear()
            self._settled.clear()
            self._conclude("abandoned")

    @contextmanager
    def _guarded(self) -> Generator[None]:
        try:
            yield
        except Exception:
            _log.exception("session %s: no more spans", self._session)
            self._broken = True
            self._open.clear()
            self._settled.clear()

    # Requests ------------------------------------------------------------------------------------

    def _take(self, input: Message) -> None:
        """A message has come; if it is a request that was accepted just now, its span begins."""
        inbox, envelope = self._machine.inbox, input.envelope
        new, self._received = inbox.received > self._received, inbox.received
        if not new or envelope is None or envelope.id is None or envelope.method is None:
            return
        opened = inbox.open.get(envelope.id)
        if opened is not None and opened.number == inbox.received:
            self._open[envelope.id] = (self._begin(input, envelope, envelope.method), envelope.method)

    def _begin(self, input: Message, envelope: Envelope, method: str) -> Span:
        params = _params(input.data)
        ambient = get_current_span().get_span_context()
        carrier = {name: value for name, value in params.meta.items() if isinstance(value, str)}
        context = extract(carrier, get_current())
        # The request's own context is the parent, and that of its HTTP request a link; or else the parent.
        remote = get_current_span(context).get_span_context() != ambient
        about: dict[str, str] = {
            "mcp.method.name": method[:_MOST],
            "mcp.session.id": self._session,
            "jsonrpc.request.id": str(envelope.id)[:_MOST],
            "network.transport": "tcp",
            "network.protocol.name": "http" if input.connection is None else "websocket",
        }
        revision = carrier.get(_REVISION, self._revision)
        if revision is not None:
            about["mcp.protocol.version"] = revision[:_MOST]
        target = about | _target(method, params)
        name = target.get("gen_ai.tool.name") or target.get("gen_ai.prompt.name")
        return self._tracer.start_span(
            f"{about['mcp.method.name']} {name}" if name else about["mcp.method.name"],
            context,
            SpanKind.SERVER,
            target,
            [Link(ambient)] if remote else (),
        )

    def _settle(self, span: Span, method: str, input: Input) -> None:
        """Say how a request was settled."""
        over = self._machine.reason
        match input:
            case _ if over is not None:
                _fail(span, over.value, f"the session is over: {over}", _UNANSWERED)
            case Emitted():
                self._answered(span, method, input.data)
            case Lost():
                _fail(span, "outcome-unknown", input.message, _UNANSWERED)
            case _:
                _fail(span, "cancelled", "cancelled by the client")

    def _answered(self, span: Span, method: str, data: bytes) -> None:
        try:
            answer = _answer.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return  # a result that is no object
        if answer.error is not None:
            code = str(answer.error.code)[:_MOST]
            _fail(span, code, str(answer.error.message), code)
        elif answer.result is not None:
            if answer.result.isError is True:
                _fail(span, "tool_error", "")
            revision = answer.result.protocolVersion
            if method == "initialize" and isinstance(revision, str):
                self._revision = revision
                span.set_attribute("mcp.protocol.version", revision[:_MOST])

    # Upgrades ------------------------------------------------------------------------------------

    def _follow(self, input: Input, effects: list[Effect]) -> None:
        """From an offer to the binding to the end of the gap; in one step from the binding."""
        match input, effects:
            case Upgrade(), [Offered()]:
                if self._upgrade is None or self._socket is not None:
                    self._ask(input, "offered")
            case Handshake(), [Serving(delivery)]:
                if self._upgrade is None or self._socket is not None:
                    self._ask(input, "bound")
                else:
                    self._upgrade.add_event("bound", {"gapless.cursor": input.cursor.stated.seq})
                if self._upgrade is not None:
                    self._upgrade.set_attribute("gapless.generation", delivery.generation)
                self._socket = delivery.connection
            case Upgrade() | Handshake(), [Refused(refusal)]:
                self._refused(input, refusal.reason.value)
            case Acked(connection=int() as connection), _ if connection == self._socket:
                delivery = self._machine.connections.get(connection)
                if delivery is not None and delivery.gate is None:
                    self._conclude("crossed")
            case Dropped(), _ if input.connection == self._socket:
                self._conclude("dropped")
            case _:
                pass

    def _ask(self, input: Upgrade | Handshake, event: str) -> None:
        """Another upgrade begins; one that has bound a socket and not crossed its gap is over with that."""
        self._conclude("dropped")
        cursor = input.cursor.stated.seq
        about: dict[str, str | int] = {"mcp.session.id": self._session, "gapless.cursor": cursor}
        self._upgrade = self._tracer.start_span("gapless upgrade", attributes=about)
        self._upgrade.add_event(event)

    def _refused(self, input: Upgrade | Handshake, reason: str) -> None:
        if self._upgrade is not None:
            # It goes on: what was offered is there still, or bound to somebody else.
            self._upgrade.add_event("refused", {"error.type": reason})
            return
        self._ask(input, "refused")
        self._conclude(reason)

    def _conclude(self, outcome: str) -> None:
        """The upgrade that is under way, if one is, has come to this."""
        span, self._upgrade, self._socket = self._upgrade, None, None
        if span is None:
            return
        span.set_attribute("gapless.outcome", outcome)
        if outcome != "crossed":
            _fail(span, outcome, "")
        span.end()


def _params(data: bytes) -> _Params:
    try:
        return _asked.decode(data).params
    except (msgspec.DecodeError, RecursionError):
        return _Params()


def _target(method: str, params: _Params) -> dict[str, str]:
    """What a request is about."""
    found: dict[str, str] = {}
    match method:
        case "tools/call":
            found["gen_ai.operation.name"] = "execute_tool"
            if isinstance(params.name, str):
                found["gen_ai.tool.name"] = params.name[:_MOST]
        case "prompts/get" if isinstance(params.name, str):
            found["gen_ai.prompt.name"] = params.name[:_MOST]
        case "resources/read" | "resources/subscribe" | "resources/unsubscribe" if isinstance(
            params.uri, str
        ):
            found["mcp.resource.uri"] = params.uri[:_MOST]
        case _:
            pass
    return found


def _fail(span: Span, kind: str, message: str, code: str | None = None) -> None:
    span.set_attribute("error.type", kind)
    if code is not None:
        span.set_attribute("rpc.response.status_code", code)
    span.set_status(StatusCode.ERROR, message[:_MOST] or None)
