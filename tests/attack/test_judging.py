"""Each verdict of `make attack` falls: on a stand-in with that one fault, and on no other of its verdicts."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import h11
import pytest

from tests.attack.answers import Answers
from tests.attack.campaign import FAMILIES, Attack, Report
from tests.attack.exchange import Bounds
from tests.attack.findings import VERDICTS, Findings
from tests.attack.process import Process, complaints, gapless
from tests.attack.strict import Rest, read_requests
from tests.attack.target import Target
from tests.attack.volley import Volley
from tests.attack.witnesses import Witnesses

QUICK = Bounds(answer=1.0, timers=1.0, lull=0.05, stop=1.0)
HTTP = tuple(family for family in FAMILIES if family.name in ("request lines", "headers"))


async def attacked(manner: str, folder: Path, inputs: int = 150) -> Report:
    process = Process([sys.executable, "-m", "tests.attack.standin", manner], folder / "said")
    one = Attack(
        manner, process, inputs, 1, bounds=QUICK, witnesses=False, families=HTTP, seats=0, settle=0.5
    )
    return await one.run()


def broken(findings: Findings) -> set[str]:
    return {verdict for verdict in VERDICTS if findings.broken(verdict)}


async def test_at_a_strict_server_that_says_why_it_refuses_nothing_is_found(tmp_path: Path) -> None:
    report = await attacked("good", tmp_path)
    assert report.findings.wrong == {}
    assert report.findings.sent >= 150


@pytest.mark.parametrize(
    ("manner", "verdict"),
    [
        ("breaks", "5xx"),
        ("is-busy", "5xx"),
        ("tells-traces", "traceback"),
        ("prints-traces", "traceback"),
        ("gives-no-reason", "reason"),
        ("hangs", "hang"),
        ("hangs-on", "hang"),
        ("answers-twice", "desync"),
        ("answers-inside", "desync"),
        ("answers-anything", "desync"),
        ("keeps-memory", "growth"),
        ("keeps-descriptors", "growth"),
        ("keeps-threads", "growth"),
        ("keeps-children", "growth"),
        ("keeps-sessions", "growth"),
        ("ends-badly", "alive"),
        ("stays", "alive"),
    ],
)
async def test_a_server_with_one_fault_breaks_the_verdict_that_is_about_it(
    manner: str, verdict: str, tmp_path: Path
) -> None:
    report = await attacked(manner, tmp_path, 40 if manner.startswith("hangs") else 150)
    assert verdict in broken(report.findings)
    if verdict != "5xx":  # an answer without a reason is one more fault of those
        assert broken(report.findings) <= {verdict, "reason", "hang", "alive"}


@pytest.mark.parametrize(("manner", "violation"), [("loses", "missing"), ("repeats", "repeated")])
async def test_a_server_that_loses_or_repeats_what_it_is_to_send_is_seen_by_the_witnesses(
    manner: str, violation: str, tmp_path: Path
) -> None:
    command = gapless("memory:", "--", sys.executable, "-m", "tests.attack.child", manner)
    process, findings = Process(command, tmp_path / "said"), Findings()
    await process.start()
    try:
        witnesses = Witnesses(process.url, findings, patience=3.0, pace=0.005)
        await witnesses.start(Target(process.port, seats=0, uses=0))
        await witnesses.stop()
    finally:
        await process.kill()
    assert any(violation in what for _, what in findings.wrong)


def test_what_a_witness_is_refused_is_found() -> None:
    findings = Findings()
    witnesses = Witnesses("http://127.0.0.1:1/mcp", findings)
    trace = witnesses.trace()
    trace.note("client", "Refused (listening)")
    witnesses.refused("socket", trace)
    assert broken(findings) == {"witnesses"}


def test_what_a_server_must_not_say_is_found_with_where_it_was_raised() -> None:
    said = """\
gapless: WARNING: quite so
Traceback (most recent call last):
  File "/x/door.py", line 12, in take
    raise ValueError
ValueError: 12345 is odd
gapless: ERROR: Task exception was never retrieved
"""
    bad, others = complaints(said)
    assert [what for what, _ in bad] == [
        "door.py:12 ValueError: N is odd",
        "gapless: ERROR: Task exception was never retrieved",
    ]
    assert others["gapless: WARNING: quite so"] == 1


# The readers that it judges with ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "methods", "rest"),
    [
        (b"", 0, Rest.NOTHING),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, 3, Rest.NOTHING),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGE", 1, Rest.MORE),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 0, Rest.MORE),
        (b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 0, Rest.MORE),
        (b"GET / HTTP/1.1\nHost: x\n\n", 0, Rest.MORE),
        (b"GET / HTTP/1.0\r\n\r\nGET / HTTP/1.0\r\n\r\n", 1, Rest.CLOSED),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nabGET / HTTP/1.1\r\n\r\n", 2, Rest.NOTHING),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab", 0, Rest.MORE),
        (b"POST / HTTP/1.1\r\nContent-Length: +2\r\n\r\nab", 0, Rest.MORE),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            0,
            Rest.MORE,
        ),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n0\r\n\r\n", 1, Rest.NOTHING),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n", 0, Rest.MORE),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 0, Rest.MORE),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", 1, Rest.OTHER),
    ],
)
def test_the_strict_reader_counts_what_is_whole_and_stops_where_two_readers_might_differ(
    data: bytes, methods: int, rest: str
) -> None:
    sent = read_requests(data)
    assert (len(sent.methods), sent.rest) == (methods, rest)


def _seen_by_h11(data: bytes) -> int:
    """How many whole requests another reader finds before it gives up, or another protocol begins."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=10**6)
    connection.receive_data(data)
    count = 0
    try:
        while (event := connection.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            if isinstance(event, h11.EndOfMessage):
                count += 1
                if str(connection.their_state) == "MIGHT_SWITCH_PROTOCOL":
                    break
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
    except h11.RemoteProtocolError:
        pass
    return count


def test_the_strict_reader_sees_no_request_that_h11_does_not() -> None:
    random, target = Random(1), Target(1, seats=0, uses=1)
    compared = 0
    for family in FAMILIES:
        for _ in range(100 if family.name in ("framing", "messages", "acks") else 0):
            volley = family.make(random, target)
            assert isinstance(volley, Volley)
            data = b"".join(volley.pieces)
            strict = read_requests(data)
            if b", chunked" not in data:  # codings that h11 does not know
                compared += len(strict.methods)
                assert _seen_by_h11(data) >= len(strict.methods), data
    assert compared > 1000


def test_answers_are_taken_apart_wherever_they_are_split() -> None:
    one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    two = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + one + two + b"HTTP/1.1 204 No Content\r\n\r\n" + one
    for size in range(1, len(whole)):
        answers = Answers([b"GET"] * 4)
        for at in range(0, len(whole), size):
            answers.feed(whole[at : at + size])
        assert [(a.status, bytes(a.body)) for a in answers.whole] == [
            (200, b"ab"),
            (200, b"abc"),
            (204, b""),
            (200, b"ab"),
        ]
        assert not answers.wrong


def test_what_is_no_answer_shows() -> None:
    answers = Answers([b"GET"])
    answers.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc")
    assert answers.wrong == b"c"
