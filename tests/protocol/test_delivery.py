"""C8: what a connection writes when nothing happens, and when its client is taken to be gone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless.protocol.cursor import START, Link
from gapless.protocol.delivery import ConnectionId, Deliver, Delivery, Finish, Wait
from gapless.protocol.inputs import Cursor, Emitted, Handshake, Listen, Message, Serving
from gapless.protocol.jsonrpc import peek
from gapless.protocol.refusal import CLOSE_GOING_AWAY
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits

LINK = Link(bytes(8))
EXPIRY, KEEPALIVE = 100.0, 15.0
COMMENT = b":\n\n"


class Connected:
    """A session, and a connection to it that was opened at 0."""

    def __init__(self, medium: str, primed: bool = True) -> None:
        view = View.SESSION if medium in ("events", "socket") else View.STREAM
        limits = Limits(session_expiry=EXPIRY, keepalive=KEEPALIVE)
        self.session = Session(view, LINK, limits, "os", 0.0)
        cursor = Cursor(START, LINK)
        match medium:
            case "events":
                effects = self.session.handle(Listen(ConnectionId(1), cursor), 0.0)
            case "socket":
                effects = self.session.handle(Handshake(ConnectionId(1), cursor, None, "n", "/"), 0.0)
            case "standalone":
                effects = self.session.handle(Listen(ConnectionId(1), None, LINK, primed=primed), 0.0)
            case _:
                effects = self.ask(1, primed)
        (self.delivery,) = (effect.delivery for effect in effects if isinstance(effect, Serving))
        if medium == "socket":
            self.delivery.gate = None  # its gap is acknowledged
        self.write(0.0)

    def ask(self, id: int, primed: bool = True) -> Any:
        """The client makes a request."""
        data = json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call"}).encode()
        number = {"number": id, "process": "p"} if self.session.view is View.SESSION else {}
        answer_on = ConnectionId(id)
        message = Message(data, data[:16], peek(data), **number, answer_on=answer_on, primed=primed)
        effects = self.session.handle(message, 0.0)
        self.commit()
        return effects

    def say(self, message: dict[str, Any]) -> None:
        """The MCP server says something."""
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.session.handle(Emitted(data, peek(data), None, 0), 0.0)
        self.commit()

    def commit(self) -> None:
        self.session.confirm(self.session.take())

    def write(self, now: float) -> bytes | Finish:
        """Everything that is to be written at some time, or how the connection ends."""
        out = b""
        while True:
            match self.session.poll(self.delivery, now):
                case Deliver(control, _, upto):
                    out += control
                    self.session.advance(self.delivery, upto, now)
                case Finish() as finish:
                    return finish
                case Wait():
                    return out


GONE = Finish(b"", CLOSE_GOING_AWAY)


@pytest.mark.parametrize("medium", ["events", "standalone", "call"])
@pytest.mark.rule("C8", "B9")
def test_an_event_stream_ends_when_its_client_may_have_been_gone_for_as_long_as_its_session_lives(
    medium: str,
) -> None:
    connected = Connected(medium)
    if medium == "call":
        connected.say({"id": "s", "method": "elicitation/create"})  # so that it awaits the client
        connected.write(0.0)
    assert connected.write(EXPIRY - 0.1) == COMMENT
    assert connected.write(EXPIRY) == GONE


@pytest.mark.rule("C8", "B9")
def test_a_stream_that_its_client_could_not_resume_is_not_ended() -> None:
    call = Connected("call", primed=False)
    call.say({"id": "s", "method": "elicitation/create"})
    call.write(0.0)
    assert call.write(10 * EXPIRY) == COMMENT
    assert Connected("standalone", primed=False).write(EXPIRY) == GONE, "this can be opened again"


@pytest.mark.parametrize("medium", ["events", "socket", "call"])
@pytest.mark.rule("C8", "B9")
def test_no_connection_of_a_session_that_runs_a_call_is_ended(medium: str) -> None:
    connected = Connected(medium)
    if medium != "call":
        connected.ask(1)
        connected.write(0.0)
    assert connected.write(10 * EXPIRY) not in (b"", GONE)


@pytest.mark.rule("C8", "B6", "B9")
def test_a_socket_that_is_silent_for_long_is_asked_and_ended_if_it_does_not_answer() -> None:
    socket = Connected("socket")
    assert socket.write(EXPIRY - 0.1) == b"event: keepalive\ndata: {}\n\n"
    for asked in (EXPIRY - 0.1 + KEEPALIVE, EXPIRY - 0.1 + 2 * KEEPALIVE):
        written = socket.write(asked)
        assert isinstance(written, bytes)
        assert written.startswith(b"event: probe\n")
    assert socket.write(EXPIRY + 2 * KEEPALIVE) == GONE


@pytest.mark.rule("C8", "B6")
def test_a_socket_that_answers_stays() -> None:
    socket = Connected("socket")
    for _ in range(5):
        delivery: Delivery = socket.delivery
        now = delivery.heard_at + EXPIRY
        written = socket.write(now)
        assert isinstance(written, bytes)
        assert written.startswith(b"event: probe\n")
        delivery.heard_at = now + KEEPALIVE
        assert socket.write(now + 2 * KEEPALIVE) == b"event: keepalive\ndata: {}\n\n"
