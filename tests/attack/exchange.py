"""One volley: it is sent, what comes back is read to the end, and judged."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Final

from tests.attack.answers import Answer, Answers
from tests.attack.findings import Findings
from tests.attack.frame_inputs import CLOSE, PING, frame
from tests.attack.strict import Rest, Sent, read_requests
from tests.attack.target import Seat, Target
from tests.attack.volley import Frames, Volley
from tests.attack.wire import Wire, connect

__all__ = ["Bounds", "Exchanges"]

_STATUS_OVER: Final = 404
_SHOWN: Final = 700
_NONE: Final = 1006
"""The close code of a socket that has none."""
_SENT: Final = (1, 8, 9, 10)
"""Opcodes that a server of ours sends."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds.

    Attributes:
        answer: within which a request that is whole is answered, or its connection ended.
        timers: within which the server ends a connection that owes it the rest of a request.
        lull: for how long somebody who has sent no whole request waits, before hanging up.
        stop: within which the server ends, once it is asked to; its own patience is 4.
    """

    answer: float = 15.0
    timers: float = 15.0
    lull: float = 0.15
    stop: float = 15.0


@dataclass(slots=True)
class Exchanges:
    """Sends volleys, and notes what becomes of them."""

    target: Target
    findings: Findings
    bounds: Bounds = field(default_factory=Bounds)

    async def run(self, volley: Volley | Frames, name: str, about: str) -> None:
        """One volley, of the family of that name; `about` says which, to whoever wants it again."""
        try:
            if isinstance(volley, Frames):
                await self._bind(volley, f"{about}: {name}")
            else:
                await self._send(volley, f"{about}: {name}")
        except OSError as error:
            self.findings.find("hang", f"no connection: {error}", about)
        self.findings.inputs[name] += volley.inputs

    # HTTP -----------------------------------------------------------------------------------------------

    async def _send(self, volley: Volley, about: str) -> None:
        data = b"".join(volley.pieces)
        sent = read_requests(data)
        about = f"{about} {data[:_SHOWN]!r}"
        answers = Answers([*sent.methods, sent.following])
        wire = await connect(self.target.port, answers.feed)
        self.findings.connections += 1
        try:
            for piece in volley.pieces:
                wire.write(piece)
                if piece is not volley.pieces[-1]:
                    await asyncio.sleep(0)
            await self._listen(wire, sent, answers, volley.patient, about)
        finally:
            wire.transport.abort()
        answers.end()
        self._judge(sent, answers, volley.seat, volley.plain, about)

    async def _listen(self, wire: Wire, sent: Sent, answers: Answers, patient: bool, about: str) -> None:
        """Read until it is over, one way or another."""
        due, find = len(sent.methods), self.findings.find

        def special() -> bool:
            return answers.streaming or answers.switched or bool(answers.wrong)

        def closing() -> bool:
            return bool(answers.whole) and answers.whole[-1].closes

        def enough() -> bool:
            return len(answers.whole) >= due or special() or closing()

        answered = await wire.until(enough, self.bounds.answer)
        while answers.streaming and not wire.over:  # it may end soon, and others follow
            count = len(answers.whole)
            if not await wire.until(lambda count=count: len(answers.whole) > count, self.bounds.lull):
                return
            answered = await wire.until(enough, self.bounds.answer)
        if special() or wire.over:
            return
        if not answered:
            find(
                "hang",
                "not every request is answered, and nothing more comes",
                f"{len(answers.whole)} of {due}: {about}",
            )
            return
        if closing():
            if not await wire.ended(self.bounds.answer):
                find("hang", "the last answer says close, and nothing closes", about)
            return
        if sent.rest == Rest.MORE:
            await wire.until(
                lambda: len(answers.whole) > due or special(),
                self.bounds.timers if patient else self.bounds.lull,
            )
            if special() or wire.over:
                return
            if patient and not await wire.ended(self.bounds.timers):
                find("hang", "a request that is not whole is waited for", about)
                return
        wire.half_close()
        if not await wire.ended(self.bounds.answer) and not special():
            find("hang", "everything is answered, the client has hung up, and nothing closes", about)

    def _judge(self, sent: Sent, answers: Answers, seat: Seat | None, plain: bool, about: str) -> None:
        find, whole = self.findings.find, answers.whole
        if answers.wrong:
            find("desync", f"{answers.wrong[:40]!r} is no answer", about)
        if answers.open is not None and not answers.open.streams:
            find("desync", f"it ends within an answer of status {answers.open.status}", about)
        if answers.streaming and answers.open is not None and b"HTTP/1.1 " in answers.open.body:
            find("desync", "an answer inside an event stream", about)
        every = whole if answers.open is None else [*whole, answers.open]
        count, due = len(every), len(sent.methods)
        if count > due + (sent.rest == Rest.MORE):
            find("desync", f"{count} answers to {due} requests", about)
        elif count > due and not sent.following:
            if every[-1].status < 400:
                find("desync", f"{every[-1].status} to what is no request", about)
            elif not every[-1].closes:
                find("desync", f"{every[-1].status} to what is no request, and the connection goes on", about)
        if answers.switched and len(whole) < due:
            find("desync", "a 101 overtakes the answer to what came before it", about)
        last = answers.streaming or bool(answers.wrong) or any(one.closes for one in whole)
        if plain and count < due and not last:
            what = "the connection ended before every request was answered"
            find("hang", what, f"{count} of {due}: {about}")
        for n, answer in enumerate(whole):
            self._look(answer, seat, about, [*sent.methods, sent.following, b""][n : n + 1] == [b"HEAD"])

    def _look(self, answer: Answer, seat: Seat | None, about: str, bodiless: bool) -> None:
        reason = self.findings.judge(answer, about, bodiless=bodiless)
        if seat is None:
            return
        if answer.status == _STATUS_OVER and reason.startswith(("session-", "backend-")):
            self.target.over(seat, reason)
        elif answer.status == 202:
            _, _, told = bytes(answer.body).partition(b'"received":')
            if told:
                seat.number = int(told.rstrip(b"}")) + 1

    # WebSocket ------------------------------------------------------------------------------------------

    async def _bind(self, volley: Frames, about: str) -> None:
        answers = Answers([b"GET"])
        about = f"{about} {volley.data[:_SHOWN]!r}"
        wire = await connect(self.target.port, answers.feed)
        self.findings.connections += 1
        try:
            wire.write(volley.handshake)
            answered = await wire.until(lambda: answers.switched or bool(answers.whole), self.bounds.answer)
            if not answered and not wire.over:
                self.findings.find("hang", "a handshake without an answer", about)
            if answers.switched:
                wire.write(volley.data + frame(PING, b"seen") + frame(CLOSE, b"\x03\xe8"))
                await wire.until(lambda: _closed(answers.rest) is not None, 0.5)
                wire.half_close()  # a frame that claims more than there is: nobody waits for the rest
                if not await wire.ended(self.bounds.answer):
                    self.findings.find("hang", "a socket that does not end", about)
            elif answers.wrong:
                self.findings.find("desync", f"{answers.wrong[:40]!r} is no answer", about)
        finally:
            wire.transport.abort()
        for answer in answers.whole:
            if not answers.switched or answer.status != 101:
                self._look(answer, volley.seat, about, bodiless=False)
        if answers.switched:
            self.findings.answers[101, ""] += 1
            self.findings.admitted(101, b"", about)
            deflated = b"sec-websocket-extensions" in answers.whole[0].headers
            self._read(answers.rest, volley.seat, deflated, about)

    def _read(self, data: bytes, seat: Seat, deflated: bool, about: str) -> None:
        """The server's frames; `deflated`, if they may be compressed."""
        code, at, find = _NONE, 0, self.findings.find
        while at < len(data):
            found = _next(data, at)
            if found is None:
                find("desync", "the end of a socket's bytes is no frame", f"{data[at : at + 80]!r}: {about}")
                break
            first, body, at = found
            if (
                first & (0x30 if deflated and first & 15 == 1 else 0x70)
                or not first & 0x80
                or first & 15 not in _SENT
            ):
                find("desync", f"a frame that begins {first:#x}", about)
            if first == 0x81:
                _learn(seat, body)
                if b"Traceback (most" in body:
                    find("traceback", "in a frame", f"{body[:2000]!r}: {about}")
            if first & 15 == 1 and code != _NONE:
                find("desync", "data after a close frame", f"{data[-200:]!r}: {about}")
            if first == 0x88:
                code = struct.unpack(">H", body[:2])[0] if len(body) > 1 else 1005
        self.findings.closes[code] += 1
        if code == 1011:
            find("5xx", "a socket is closed with 1011", about)


def _next(data: bytes, at: int) -> tuple[int, bytes, int] | None:
    """A frame of the server's: its first byte, its data, and where the next one begins."""
    if at + 2 > len(data) or data[at + 1] > 127:
        return None
    size, body = data[at + 1], at + 2
    if size == 126:
        size, body = int.from_bytes(data[body : body + 2], "big"), body + 2
    elif size == 127:
        size, body = int.from_bytes(data[body : body + 8], "big"), body + 8
    return (data[at], data[body : body + size], body + size) if body + size <= len(data) else None


def _closed(data: bytes) -> int | None:
    """Where a close frame ends, if there is one."""
    at = 0
    while (found := _next(data, at)) is not None:
        first, _, at = found
        if first == 0x88:
            return at
    return None


def _learn(seat: Seat, body: bytes) -> None:
    """Cursors, and the number that is due, from the server's own blocks."""
    for line in body.split(b"\n"):
        if line.startswith(b"id: "):
            seat.learn(line[4:])
        elif line.startswith(b"data: {") and b'"received":' in line:
            told = line.partition(b'"received":')[2].split(b",")[0].rstrip(b"}")
            if told.isdigit():
                seat.number = int(told) + 1
