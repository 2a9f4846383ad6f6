"""OpenTelemetry: a span for each request and each upgrade, with the trace context of whoever asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode
from starlette.types import Receive, Scope, Send

from gapless.log.sqlite import SqliteLog
from gapless.server import tracing
from gapless.server.intake import message_input
from tests.server.harness import Fragile, Serve, Server, Session, encode, note, request, result, soon
from tests.server.restarts import key_of, restarted, shaken, stored

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = "00f067aa0ba902b7"
META: Final = {
    "traceparent": f"00-{TRACE}-{PARENT}-01",
    "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    "baggage": "userId=alice",
}


class Kept(SpanProcessor):
    """Every span that began and every one that ended, in order."""

    def __init__(self) -> None:
        self.begun: list[ReadableSpan] = []
        self.ended: list[ReadableSpan] = []
        self.baggage: list[Mapping[str, object]] = []

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self.begun.append(span)
        self.baggage.append(baggage.get_all(parent_context))

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)

    def one(self) -> ReadableSpan:
        """The only span, which has ended."""
        (span,) = self.ended
        assert len(self.begun) == 1
        return span


def about(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes."""
    return dict(span.attributes or {})


def identity(span: ReadableSpan) -> int:
    """A span's own ID."""
    assert span.context is not None
    return span.context.span_id


def told(span: ReadableSpan) -> tuple[StatusCode, Any, Any]:
    """How a span ended."""
    found = about(span)
    return span.status.status_code, found.get("error.type"), found.get("rpc.response.status_code")


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """A tracer provider that is set."""
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(tracing, "get_tracer_provider", lambda: provider)
    return provider


@pytest.fixture
def kept(provider: TracerProvider) -> Kept:
    kept = Kept()
    provider.add_span_processor(kept)
    return kept


async def settled(server: Server) -> None:
    """Every session has everything in the log."""
    for live in server.app.sessions.all():
        await soon(live.durable())


async def asked(session: Session, id: int | str = 1, **params: Any) -> dict[str, Any]:
    """A request under the next number, once the MCP server has it."""
    number = session.server.app.sessions._live[key_of(session.token)].machine.inbox.received + 1
    assert (await session.post(number, request(id, **params))).status == 202
    return await session.backend.take()


# Requests -------------------------------------------------------------------------------------------


async def test_a_request_is_a_span_named_and_attributed_by_the_conventions(
    server: Server, kept: Kept
) -> None:
    session = await shaken(server)
    (hello,) = kept.ended
    assert hello.name == "initialize"
    assert about(hello)["mcp.protocol.version"] == "2025-11-25"
    await asked(session, 7, name="weather", arguments={"where": "here"})
    await session.backend.say(result(7))
    span = kept.ended[1]
    assert (span.name, span.kind) == ("tools/call weather", SpanKind.SERVER)
    assert about(span) == {
        "mcp.method.name": "tools/call",
        "mcp.session.id": key_of(session.token).hex()[:8],
        "mcp.protocol.version": "2025-11-25",
        "jsonrpc.request.id": "7",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "weather",
        "network.transport": "tcp",
        "network.protocol.name": "http",
    }
    assert told(span) == (StatusCode.UNSET, None, None)
    scope = span.instrumentation_scope
    assert scope is not None
    assert scope.name == "gapless"


@pytest.mark.parametrize(
    ("method", "params", "name", "what"),
    [
        ("prompts/get", {"name": "hi"}, "prompts/get hi", {"gen_ai.prompt.name": "hi"}),
        ("resources/read", {"uri": "x:y"}, "resources/read", {"mcp.resource.uri": "x:y"}),
        ("tools/call", {"name": 5}, "tools/call", {"gen_ai.operation.name": "execute_tool"}),
        ("tools/list", {"name": "x", "uri": "x"}, "tools/list", {}),
        ("m" * 300, {}, "m" * 256, {}),
        ("tools/call", {"name": "n" * 300}, "tools/call " + "n" * 256, {"gen_ai.tool.name": "n" * 256}),
    ],
)
async def test_what_a_request_is_about_is_told_where_it_has_a_name_and_cut_where_that_is_long(
    server: Server, kept: Kept, method: str, params: dict[str, Any], name: str, what: dict[str, str]
) -> None:
    session = await server.started()
    assert (await session.post(2, request(1, method, **params))).status == 202
    await session.backend.say(result(1))
    span = kept.one()
    assert span.name == name
    found = about(span)
    targets = ("gen_ai.operation.name", "gen_ai.tool.name", "gen_ai.prompt.name", "mcp.resource.uri")
    expected = {"gen_ai.operation.name": "execute_tool"} if method == "tools/call" else {}
    assert {key: found[key] for key in targets if key in found} == expected | what


async def test_the_parent_of_a_span_is_the_trace_context_of_its_request_which_the_backend_gets_as_it_was(
    server: Server, kept: Kept
) -> None:
    session = await server.started()
    meta = META | {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "progressToken": 1}
    # Keys that a parser would reorder, spaces and escapes that it would drop: bytes are passed on.
    sent = (
        b'{"method": "tools/call", "params": {"_meta": %s, "name": "caf\\u00e9"}, "id":1, "jsonrpc":"2.0" }'
        % (json.dumps(meta, indent=None).encode())
    )
    assert (await session.post(2, sent)).status == 202
    await session.backend.take()
    assert session.backend.sent[-1] == sent
    await session.backend.say(result(1))
    span = kept.one()
    parent, own = span.parent, span.get_span_context()
    assert parent is not None
    assert own is not None
    assert (f"{own.trace_id:032x}", f"{parent.span_id:016x}", parent.is_remote) == (TRACE, PARENT, True)
    assert own.trace_state.to_header() == META["tracestate"]
    assert kept.baggage == [{"userId": "alice"}]
    assert about(span)["mcp.protocol.version"] == "2026-07-28"
    assert span.name == "tools/call café"
    assert span.links == ()


@pytest.mark.parametrize(
    "params",
    [
        {"_meta": {"traceparent": "00-zz"}},
        {"_meta": {"traceparent": 5, "tracestate": [1], "baggage": {"a": 1}}},
        {"_meta": {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"}},
        {"_meta": {"io.modelcontextprotocol/protocolVersion": 7}},
        {"_meta": ["traceparent"]},
        {"_meta": None},
        [1, 2],
        "x",
        None,
    ],
)
async def test_a_context_that_is_none_costs_nothing_but_the_parent(
    server: Server, kept: Kept, params: Any
) -> None:
    session = await server.started()
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    assert (await session.post(2, call)).status == 202
    assert await session.backend.take() == call
    await session.backend.say(result(1))
    assert (kept.one().parent, kept.one().name) == (None, "tools/call")
    assert "mcp.protocol.version" not in about(kept.one())


async def test_the_span_of_the_http_request_is_a_link_or_else_the_parent(
    serve: Serve, kept: Kept, provider: TracerProvider
) -> None:
    def traced(app: Any) -> Any:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            with provider.get_tracer("http").start_as_current_span("around"):
                await app(scope, receive, send)

        return wrapped

    session = await (await serve(wrap=traced)).started()
    await asked(session, 1, _meta=META)
    await asked(session, 2)
    await session.backend.say(result(1), result(2))
    linked, child = [span for span in kept.ended if span.name == "tools/call"]
    around = {identity(span) for span in kept.begun if span.name == "around"}
    (link,) = linked.links
    assert link.context.span_id in around
    assert linked.parent is not None
    assert f"{linked.parent.span_id:016x}" == PARENT
    assert child.parent is not None
    assert child.parent.span_id in around
    assert child.links == ()


async def test_a_span_is_over_when_its_answer_is_durable_and_not_before(serve: Serve, kept: Kept) -> None:
    log = Fragile()
    session = await (await serve(log)).started()
    await asked(session)
    log.gate.clear()
    await session.backend.emit(result(1))
    await soon(log.held.wait())
    assert (len(kept.begun), kept.ended) == (1, [])
    log.gate.set()
    await settled(session.server)
    assert told(kept.one()) == (StatusCode.UNSET, None, None)


async def test_an_answer_that_came_during_a_commit_is_told_after_the_next(serve: Serve, kept: Kept) -> None:
    log = Fragile()
    session = await (await serve(log)).started()
    await asked(session)
    log.gate.clear()
    await session.backend.emit(note())
    await soon(log.held.wait())
    await session.backend.emit(result(1))
    log.held.clear()
    log.gate.set()  # for the one that waits
    log.gate.clear()
    await soon(log.held.wait())
    assert (len(kept.begun), kept.ended) == (1, [])
    log.gate.set()
    await settled(session.server)
    assert told(kept.one()) == (StatusCode.UNSET, None, None)


async def test_a_request_that_another_process_accepted_is_no_span_here_when_it_is_sent_again(
    serve: Serve, kept: Kept, tmp_path: Path
) -> None:
    session = await shaken(await serve(SqliteLog(tmp_path / "log.db")))
    listen = request("l", "subscriptions/listen", notifications={})
    assert (await session.post(3, listen)).status == 202
    server = await restarted(serve, tmp_path / "log.db", session)
    begun = len(kept.begun)
    assert (await session.post(3, listen)).json() == {"received": 3}
    assert "l" in server.app.sessions._live[key_of(session.token)].machine.inbox.open
    assert len(kept.begun) == len(kept.ended) == begun


async def test_a_request_on_a_socket_and_one_of_the_stream_view_are_spans_too(
    server: Server, kept: Kept
) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, request("a"))
    await session.backend.take()
    await session.backend.say(result("a"))
    streams = await server.initialized()
    call = await streams.call("b")
    await streams.backend.take()
    await streams.backend.say(result("b"))
    await call.message()
    found = {
        about(span)["jsonrpc.request.id"]: about(span) for span in kept.ended if span.kind is SpanKind.SERVER
    }
    assert {id: each["network.protocol.name"] for id, each in found.items()} == {
        "a": "websocket",
        "0": "http",
        "b": "http",
    }
    assert found["b"]["mcp.protocol.version"] == "2025-11-25"
    assert found["b"]["mcp.session.id"] == key_of(streams.token).hex()[:8]
    socket.drop()


async def test_messages_that_start_no_request_are_no_spans(server: Server, kept: Kept) -> None:
    session = await server.started()
    call = request(1)
    await session.post(2, call)
    await session.post(2, call)  # again
    await session.post(3, call)  # its ID is in flight
    await session.post(9, request(2))  # a hole
    await session.post(4, b'{"jsonrpc":"2.0","id":3,"method":"x"')  # no JSON
    await session.post(5, note())
    await session.backend.say(request("q", "elicitation/create"), note(), result(99))
    await session.post(6, result("q"))
    assert (len(kept.begun), kept.ended) == (1, [])
    await session.backend.say(result(1))
    assert about(kept.one())["jsonrpc.request.id"] == "1"
    await session.post(6, result("q"))
    await session.post(7, call)  # an ID may be used again
    await session.backend.say(result(1))
    assert len(kept.ended) == 2


# How they end ---------------------------------------------------------------------------------------


async def _error(session: Session) -> None:
    await session.backend.say({"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "what?"}})


async def _tool_error(session: Session) -> None:
    await session.backend.say(result(1, content=[], isError=True))


async def _odd(session: Session) -> None:
    await session.backend.say({"jsonrpc": "2.0", "id": 1, "result": 5})


async def _no_error(session: Session) -> None:
    await session.backend.say(result(1, isError=False, protocolVersion="1"))


async def _cancelled(session: Session) -> None:
    await session.post(4, note("notifications/cancelled", requestId=1))


async def _backend_crashed(session: Session) -> None:
    await session.backend.lose("it crashed")
    await soon(session.server.backends.opened())


async def _ended(session: Session) -> None:
    assert (await session.delete()).status == 204


async def _superseded(session: Session) -> None:
    await session.pend((await session.ids())[0])
    assert (await session.get()).status == 200  # without a cursor, at the boundary: B1


@pytest.mark.parametrize(
    ("end", "status", "kind", "code"),
    [
        (_error, StatusCode.ERROR, "-32602", "-32602"),
        (_tool_error, StatusCode.ERROR, "tool_error", None),
        (_odd, StatusCode.UNSET, None, None),
        (_no_error, StatusCode.UNSET, None, None),
        (_cancelled, StatusCode.ERROR, "cancelled", None),
        (_backend_crashed, StatusCode.ERROR, "outcome-unknown", "-32000"),
        (_ended, StatusCode.ERROR, "session-ended", "-32000"),
        (_superseded, StatusCode.ERROR, "session-superseded", "-32000"),
    ],
)
async def test_a_request_that_fails_or_is_settled_otherwise_says_how(
    server: Server,
    kept: Kept,
    end: Callable[[Session], Awaitable[None]],
    status: StatusCode,
    kind: str | None,
    code: str | None,
) -> None:
    session = await shaken(server)
    await asked(session)
    kept.begun, kept.ended = kept.begun[1:], []
    await end(session)
    await settled(server)
    (span,) = [span for span in kept.ended if span.kind is SpanKind.SERVER]
    assert told(span) == (status, kind, code)
    assert about(span)["mcp.protocol.version"] == "2025-11-25"
    if end is _error:
        assert span.status.description == "what?"
    if end is _backend_crashed:
        assert span.status.description == "it crashed"


async def test_a_request_of_a_session_whose_backend_is_lost_says_so(serve: Serve, kept: Kept) -> None:
    session = await (await serve(on_backend_loss="supersede")).started()
    await asked(session)
    await session.backend.lose("no use")
    await settled(session.server)
    assert told(kept.one()) == (StatusCode.ERROR, "backend-lost", "-32000")


async def test_a_request_that_outlives_its_server_is_abandoned_there(serve: Serve, kept: Kept) -> None:
    """It is in the log: whoever goes on with the session settles it."""
    server = await serve()
    session = await server.started()
    await session.pend(session.start)
    await asked(session)
    await serve.stop(server)
    assert {span.name: told(span) for span in kept.ended} == {
        "tools/call": (StatusCode.ERROR, "abandoned", None),
        "gapless upgrade": (StatusCode.ERROR, "abandoned", None),
    }
    assert len(kept.begun) == 2


async def test_a_request_of_a_session_that_another_process_takes_is_abandoned_here(
    server: Server, kept: Kept
) -> None:
    session = await server.started()
    await asked(session)
    live = server.app.sessions._live[key_of(session.token)]
    found = await stored(server, session)
    await server.log.acquire(found.key, found.fence, await server.log.join("/nowhere/door.sock"))
    await session.backend.emit(result(1))
    await soon(session.backend.closed.wait())
    await server.app.sessions.clean(0.0)
    await soon(asyncio.gather(*server.app.sessions._leaving))
    live.offer(message_input(encode(request(2)), 1000, number=3, process="p"))  # by one who was on the way
    assert told(kept.one()) == (StatusCode.ERROR, "abandoned", None)


# Upgrades -------------------------------------------------------------------------------------------


def course(span: ReadableSpan) -> tuple[list[str], dict[str, Any]]:
    """What happened to an upgrade, and what its span says of it."""
    found = {key.removeprefix("gapless."): value for key, value in about(span).items()}
    return [event.name for event in span.events], found


async def test_an_upgrade_is_a_span_from_its_offer_to_the_end_of_its_gap(server: Server, kept: Kept) -> None:
    session = await server.started()
    await session.backend.say(note(step=1), note(step=2))
    first = (await session.ids())[0]
    offer = await session.pend(first)
    await session.pend(first, "n2")  # the same offer
    socket = await session.bind(first, offer["ticket"])
    echo = await socket.control("resume-cursor")
    for number, event in enumerate(await socket.events(2), 2):
        assert (len(kept.begun), kept.ended) == (1, [])
        assert event.id is not None
        await socket.ack(event.id)
        await socket.say(number, note())  # what comes after it says that the ack was taken
        await session.backend.take()
    span = kept.one()
    name = key_of(session.token).hex()[:8]
    assert (span.name, span.kind, span.status.status_code) == (
        "gapless upgrade",
        SpanKind.INTERNAL,
        StatusCode.UNSET,
    )
    assert course(span) == (
        ["offered", "bound"],
        {"mcp.session.id": name, "cursor": 1, "generation": echo["generation"], "outcome": "crossed"},
    )
    socket.drop()


async def test_an_upgrade_in_one_step_begins_with_its_binding(server: Server, kept: Kept) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, note())
    await session.backend.take()
    events, found = course(kept.one())
    assert (events, found["outcome"], found["cursor"]) == (["bound"], "crossed", 0)
    await socket.close()
    await soon(_unbound(session))
    again = await session.bind(session.start)
    again.drop()
    await soon(_unbound(session))
    assert len(kept.begun) == len(kept.ended) == 2


async def _unbound(session: Session) -> None:
    while session.server.app.sessions._live[key_of(session.token)].machine.connections:
        await session.server.ask("GET", "/healthz")


async def test_an_upgrade_whose_socket_goes_within_its_gap_says_so(server: Server, kept: Kept) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    socket.drop()
    await soon(_unbound(session))
    assert told(kept.one())[:2] == (StatusCode.ERROR, "dropped")
    assert course(kept.one())[1]["outcome"] == "dropped"


async def test_an_upgrade_that_takes_the_place_of_another_ends_that(serve: Serve, kept: Kept) -> None:
    session = await (await serve(probe_timeout=0.05)).started()
    silent = await session.bind(session.start)
    await silent.control("resume-cursor")
    another = await session.bind(session.start)
    await another.cross()
    await another.say(2, note())
    await session.backend.take()
    assert [course(span)[1]["outcome"] for span in kept.ended] == ["dropped", "crossed"]
    assert [course(span)[1]["generation"] for span in kept.ended] == [1, 2]
    silent.drop()
    another.drop()


async def test_an_upgrade_that_is_refused_says_why_and_one_that_goes_on_has_it_as_an_event(
    server: Server, kept: Kept
) -> None:
    session = await server.started()
    assert (await session.denied(session.start, "none")).reason == (409, "ticket-spent")
    assert told(kept.one())[:2] == (StatusCode.ERROR, "ticket-spent")
    assert course(kept.one())[0] == ["refused"]
    offer = await session.pend(session.start)
    assert (await session.denied(session.start, "none")).reason == (409, "ticket-spent")
    assert len(kept.ended) == 1
    socket = await session.bind(session.start, offer["ticket"])
    await socket.cross()
    await socket.say(2, note())
    await session.backend.take()
    assert course(kept.ended[1])[0] == ["offered", "refused", "bound"]
    refused = kept.ended[1].events[1]
    assert dict(refused.attributes or {}) == {"error.type": "ticket-spent"}
    socket.drop()


async def test_an_upgrade_of_a_session_that_ends_ends_with_it(server: Server, kept: Kept) -> None:
    session = await server.started()
    await session.pend(session.start)
    assert (await session.delete()).status == 204
    assert course(kept.one())[1]["outcome"] == "session-ended"
    assert told(kept.one())[0] is StatusCode.ERROR


# What they cost -------------------------------------------------------------------------------------


async def test_no_span_outlives_a_busy_server(serve: Serve, kept: Kept) -> None:
    server = await serve()
    sessions = [await server.started() for _ in range(5)]
    for session in sessions:
        for number in range(20):
            await asked(session, number)
        await session.backend.say(*(result(number) for number in range(10)))
        await session.pend(session.start)
    await sessions[0].delete()
    await sessions[1].backend.lose()
    await sessions[2].bind(sessions[2].start)
    await settled(server)
    await serve.stop(server)
    assert len(kept.begun) == len(kept.ended) == 5 * 20 + 5
    assert {identity(span) for span in kept.begun} == {identity(span) for span in kept.ended}


@pytest.mark.parametrize("provider_", [None, NoOpTracerProvider()])
async def test_nothing_is_looked_into_where_no_provider_is_set(
    server: Server, monkeypatch: pytest.MonkeyPatch, provider_: NoOpTracerProvider | None
) -> None:
    class Unwanted:
        def decode(self, data: bytes) -> Any:
            raise AssertionError(data)

    if provider_ is not None:
        monkeypatch.setattr(tracing, "get_tracer_provider", lambda: provider_)
    for name in ("_asked", "_answer"):
        monkeypatch.setattr(tracing, name, Unwanted())
    session = await server.started()
    await asked(session)
    await session.backend.say(result(1))
    (live,) = server.app.sessions.all()
    assert live._spans is None


def test_opentelemetry_is_not_imported_until_somebody_does() -> None:
    """So it need not be installed."""
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from gapless.protocol.session import Session, View\n"
        "from gapless.server.app import build\n"
        "from gapless.server.observer import Observer\n"
        "assert Observer().spans('x', None) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.')]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


@pytest.mark.parametrize("at", ["on_start", "on_end"])
async def test_a_span_processor_that_fails_costs_a_session_its_spans_and_nothing_else(
    server: Server, kept: Kept, provider: TracerProvider, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    class Broken(SpanProcessor):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    broken = Broken()
    setattr(broken, at, fail)
    provider.add_span_processor(broken)
    session = await server.started()
    for number in range(1, 4):
        await asked(session, number)
        await session.backend.say(result(number))
    assert len(await session.ids()) == 3
    complaints = [record for record in caplog.records if record.name == "gapless.tracing"]
    assert [record.getMessage() for record in complaints] == [
        f"session {key_of(session.token).hex()[:8]}: no more spans"
    ]
    assert len(kept.begun) == 1
    assert (await session.delete()).status == 204


async def test_no_span_has_a_token_a_ticket_or_a_link(server: Server, kept: Kept) -> None:
    session = await shaken(server)
    await asked(session, 1, name="x")
    await session.backend.say(result(1))
    cursor = (await session.ids())[0]
    offer = await session.pend(cursor)
    assert (await session.denied(cursor, "wrong-ticket")).status == 409
    socket = await session.bind(cursor, offer["ticket"])
    await socket.cross()
    await session.delete()
    told = "".join(span.to_json() for span in kept.ended)
    assert told.count('"name": "gapless upgrade"') == 1
    for secret in (session.token, offer["ticket"], "wrong-ticket", cursor.rpartition(".")[2]):
        assert secret not in told
