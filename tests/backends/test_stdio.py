"""Whatever a stdio server does, it costs its own session alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import uvloop

from gapless.backends import stdio
from gapless.backends.base import Backend
from gapless.backends.stdio import StdioBackends
from gapless.errors import BackendError, UsageError
from gapless.protocol.jsonrpc import Envelope, RequestId, peek
from tests.backends.conftest import Lifelines, Recorder, soon

CHILDREN = Path(__file__).with_name("children")

Open = Callable[..., Awaitable[Backend]]


def child(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", str(CHILDREN / script), *map(str, arguments)]


def saying(*lines: bytes) -> list[str]:
    return child("say.py", b"".join(lines).hex())


def request(id: int | str, method: str = "ping") -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method}).encode()


async def send(backend: Backend, data: bytes) -> None:
    await soon(backend.send(data, peek(data)))


async def answers(backend: Backend, sink: Recorder) -> None:
    """It still works: what it is sent comes back, next of all."""
    await send(backend, request("still there?"))
    assert (await sink.next())["id"] == "still there?"


@pytest.fixture
async def start(sink: Recorder) -> AsyncIterator[Open]:
    """Opens sessions, on `sink` by default, and closes them in the end."""
    opened: list[Backend] = []

    async def open(command: list[str], sink: Recorder = sink, **settings: Any) -> Backend:
        backends = StdioBackends(command, **settings)
        await backends.start()
        backend = await soon(backends.open(sink))
        opened.append(backend)
        return backend

    yield open
    for backend in opened:
        await soon(backend.close())


async def another_session_runs(start: Open) -> None:
    """Time enough for whatever must not happen."""
    sink = Recorder()
    backend = await start(saying(), sink)
    await answers(backend, sink)
    await soon(backend.close())


# --- what goes through ------------------------------------------------------------------


async def test_messages_pass_in_both_directions_byte_for_byte(start: Open, sink: Recorder) -> None:
    backend = await start(saying())
    for id in (1, "1", "ü\u2028"):
        await send(backend, request(id))
        assert await sink.next() == json.loads(request(id))
    assert {related for _, related in sink.emitted} == {None}


async def test_many_messages_in_one_write_come_one_by_one_in_order(start: Open, sink: Recorder) -> None:
    await start(saying(*(request(n) + b"\n" for n in range(500))))
    assert [(await sink.next())["id"] for _ in range(500)] == list(range(500))


async def test_blank_lines_and_crlf_are_no_trouble(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    await start(saying(b"\n\r\n", request(1), b"\r\n  \n", request(2), b"\n"))
    assert [(await sink.next())["id"] for _ in range(2)] == [1, 2]
    assert not caplog.records


async def test_the_command_gets_its_arguments_its_environment_and_its_directory(
    start: Open, sink: Recorder, tmp_path: Path
) -> None:
    program = (
        "import json, os, sys; print(json.dumps({'jsonrpc': '2.0', 'method': 'n', 'params': "
        "{'args': sys.argv[1:], 'env': os.environ.get('LADDER'), 'cwd': os.getcwd()}}))"
    )
    await start([sys.executable, "-c", program, "a b", ""], env={"LADDER": "tall"}, cwd=tmp_path)
    told = (await sink.next())["params"]
    assert told == {"args": ["a b", ""], "env": "tall", "cwd": str(tmp_path)}


async def test_what_the_command_writes_to_stderr_goes_to_ours(
    start: Open, sink: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    await start(["sh", "-c", "echo a word aside >&2"])
    await sink.loss()
    assert capfd.readouterr().err == "a word aside\n"


async def test_a_sink_that_is_busy_stops_the_server_s_writing(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    sink.gate.clear()
    await start(child("idler.py", lifelines.port, "chatter"))
    await lifelines.born("idler")
    written = asyncio.create_task(lifelines.said("idler"))
    assert (await sink.next())["params"]["n"] == 0
    run = len(sink.emitted)  # what one look at the pipe found
    await another_session_runs(start)
    assert not written.done()
    assert len(sink.emitted) == run < 5_000
    sink.gate.set()
    assert await written == "written"
    assert [(await sink.next())["params"]["n"] for _ in range(1, 5_000)] == list(range(1, 5_000))


async def test_sending_to_a_server_that_does_not_read_waits_until_it_is_closed(
    start: Open, lifelines: Lifelines
) -> None:
    backend = await start(child("idler.py", lifelines.port, "listen"))
    await lifelines.born("idler")
    data = request("x" * 1_000_000)
    sending = asyncio.create_task(backend.send(data, peek(data)))
    await another_session_runs(start)
    assert not sending.done()
    await soon(backend.close())
    with pytest.raises(BackendError):
        await soon(sending)
    await lifelines.dead("idler")


# --- what must not pass -----------------------------------------------------------------


@pytest.mark.parametrize(
    "banner",
    [
        pytest.param(b"Ladder server 1.0, ready on stdio", id="a banner"),
        pytest.param(b'{"level": "info", "error": null, "id": 1}', id="JSON that is no JSON-RPC"),
        pytest.param(b'[{"jsonrpc": "2.0", "id": 1, "result": {}}]', id="a batch"),
        pytest.param(b'{"jsonrpc": "2.0", "method": "n", "params": {"text": "\xff"}}', id="a notification"),
        pytest.param(b'{"jsonrpc": "2.0", "id": 1.5, "result": {}}', id="an ID that nobody has"),
        pytest.param(b'{"jsonrpc": "2.0", "id": "\\ud800", "result": NaN}', id="an ID that nobody can have"),
        pytest.param(b"\x00\xff\xfe", id="rubbish"),
    ],
)
async def test_what_is_no_message_is_skipped_and_logged(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture, banner: bytes
) -> None:
    backend = await start(saying(banner, b"\n"))
    await answers(backend, sink)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert repr(banner.decode(errors="replace")) in record.getMessage()


async def test_a_skipped_line_is_logged_cut_to_200_characters(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = await start(saying("ü".encode() * 300, b"\n"))
    await answers(backend, sink)
    (record,) = caplog.records
    assert "ü" * 200 in record.getMessage()
    assert "ü" * 201 not in record.getMessage()


UNUSABLE = [
    pytest.param(b'"\xff"', "UTF-8", id="invalid UTF-8"),
    pytest.param(b'"\\ud800"', "not a JSON", id="a lone surrogate"),
    pytest.param(b"NaN", "malformed", id="NaN"),
    pytest.param(b'"\x07"', "malformed", id="a raw control"),
    pytest.param(b"[" * 25_000 + b"]" * 25_000, "recursion", id="nesting too deep"),
    pytest.param(b'"half', "not a JSON", id="what another thread has printed into"),
]


@pytest.mark.parametrize(("payload", "trouble"), UNUSABLE)
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b'{"jsonrpc": "2.0", "id": 7, "result": {"a": %b}}', id="id first"),
        pytest.param(b'{"id":7,"jsonrpc":"2.0","error":{"code":1,"message":%b}}', id="an error"),
    ],
)
async def test_an_unusable_answer_becomes_an_error_under_its_id(
    start: Open, sink: Recorder, answer: bytes, payload: bytes, trouble: str
) -> None:  # W4
    backend = await start(saying(answer % payload, b"\n"))
    error = await sink.next()
    assert (error["id"], error["error"]["code"]) == (7, -32603)
    assert trouble in error["error"]["message"]
    await answers(backend, sink)


async def test_an_id_after_the_payload_is_found_and_one_inside_it_is_not(
    start: Open, sink: Recorder
) -> None:  # W4
    # As the TypeScript SDK writes them.
    inside = rb'{"result":{"a":"\ud800","id":8},"jsonrpc":"2.0"}'
    after = rb'{"result":{"a":"\ud800","id":8},"jsonrpc":"2.0","id":"s\"even"}'
    await start(saying(inside, b"\n", after, b"\n"))
    assert (await sink.next())["id"] == 's"even'


async def test_an_unusable_request_of_the_server_is_answered_to_the_server(
    start: Open, sink: Recorder
) -> None:  # W4
    # `say.py` answers it with itself, which shows what the server was sent.
    backend = await start(saying(b'{"jsonrpc": "2.0", "id": 7, "method": "ask", "params": NaN}\n'))
    error = await sink.next()
    assert (error["id"], error["error"]["code"]) == (7, -32600)
    await answers(backend, sink)


@pytest.mark.parametrize(
    ("line", "id"),
    [
        pytest.param('{"jsonrpc":"2.0","id":7,"result":{"a":"@"}}', 7, id="id first"),
        pytest.param('{"result":{"a":"@","id":1},"jsonrpc":"2.0","id":"7"}', "7", id="id last"),
        pytest.param('{"jsonrpc":"2.0","method":"n","params":{"id":1,"a":"@"}}', None, id="a notification"),
        pytest.param("@", None, id="rubbish"),
    ],
)
async def test_a_line_of_200_mb_is_never_in_memory(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture, line: str, id: int | str | None
) -> None:  # W5
    tracemalloc.start()
    try:
        backend = await start(child("giant.py", line, 200))
        if id is not None:
            error = await sink.next()
            assert (error["id"], error["error"]["code"]) == (id, -32603)
            assert "above the limit of 4194304" in error["error"]["message"]
        await answers(backend, sink)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 1024 * 1024
    assert "above the limit" in caplog.text


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_a_message_of_exactly_the_limit_passes_and_one_more_byte_does_not(
    start: Open, sink: Recorder, end: bytes
) -> None:  # W5
    fits, over = (b'{"jsonrpc":"2.0","id":7,"result":"%b"}' % (b"x" * n) for n in (9_000, 9_001))
    await start(saying(fits, end, over, end, fits, end), max_message_bytes=len(fits))
    got = [await sink.next() for _ in range(3)]
    assert [got[0], got[2]] == [json.loads(fits)] * 2
    assert (got[1]["id"], got[1]["error"]["code"]) == (7, -32603)


async def test_a_line_above_the_limit_of_which_only_white_space_was_kept_is_told(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture
) -> None:  # W5
    await start(
        saying(b" " * 5_000, request(1), b" " * 5_000, b"\n", request(2), b"\n"), max_message_bytes=9_000
    )
    assert (await sink.next())["id"] == 2
    assert "above the limit of 9000" in caplog.text


# --- how it ends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("0", "exited with status 0"),
        ("3", "exited with status 3"),
        ("-9", "was killed by SIGKILL"),
        ("-11", "was killed by SIGSEGV"),
    ],
)
@pytest.mark.parametrize(
    "answered", [pytest.param(0, id="during initialize"), pytest.param(1, id="in mid-call")]
)
async def test_a_crash_is_told_once_after_every_whole_line(
    start: Open, sink: Recorder, caplog: pytest.LogCaptureFixture, answered: int, ending: str, said: str
) -> None:
    backend = await start(child("crash.py", answered, ending))
    for id in range(answered + 1):
        await send(backend, request(id))
    assert said in await sink.loss()
    seen = [message.get("id", message.get("params")) for message, _ in sink.emitted]
    assert seen == [
        *range(answered),
        {"progressToken": 1, "progress": 1},
        {"progressToken": 1, "progress": 2},
    ]
    assert "an unfinished line" in caplog.text
    with pytest.raises(BackendError, match="gone"):
        await send(backend, request(5))
    await soon(backend.close())
    assert len(sink.losses) == 1


async def test_the_loss_names_the_command_without_its_arguments(start: Open, sink: Recorder) -> None:
    await start(["sh", "-c", "exit 4", "--token=secret"])
    assert await sink.loss() == "the MCP server 'sh' exited with status 4"


async def test_a_loss_waits_until_the_sink_has_taken_the_last_message(start: Open, sink: Recorder) -> None:
    sink.gate.clear()
    await start(["printf", request(1).decode() + "\n"])
    await sink.next()
    await another_session_runs(start)
    assert not sink.losses
    sink.gate.set()
    await sink.loss()


async def test_a_server_that_closes_its_stdout_is_lost_and_ended(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    await start(child("idler.py", lifelines.port, "hang-up"))
    assert "SIGTERM" in await sink.loss()
    await lifelines.dead("idler")


async def test_closing_tells_no_loss_and_is_idempotent(start: Open, sink: Recorder) -> None:
    backend = await start(saying())
    await answers(backend, sink)
    await soon(asyncio.gather(backend.close(), backend.close()))
    await soon(backend.close())
    assert not sink.losses
    with pytest.raises(BackendError):
        await send(backend, request(1))


async def test_closing_goes_on_when_who_asked_for_it_is_cancelled(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    backend = await start(child("family.py", lifelines.port))
    await sink.next()
    closing = asyncio.create_task(backend.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await lifelines.dead("child", "grandchild")
    await soon(backend.close())


async def test_closing_while_the_sink_is_busy_emits_nothing_more(start: Open, sink: Recorder) -> None:
    sink.gate.clear()
    backend = await start(saying(request(1), b"\n", request(2), b"\n"))
    await sink.next()
    await soon(backend.close())
    sink.gate.set()
    await another_session_runs(start)
    assert len(sink.emitted) == 1
    assert not sink.losses


@pytest.mark.parametrize("moment", ["emit", "lost"])
async def test_the_sink_may_close_the_backend_from_within(start: Open, moment: str) -> None:
    closed = asyncio.Event()

    class Closer(Recorder):
        async def emit(
            self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
        ) -> None:
            await super().emit(data, envelope, related, more)
            if moment == "emit":
                await backend.close()
                closed.set()

        async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
            await super().lost(message)
            await backend.close()
            closed.set()

    sink = Closer()
    backend = await start(["printf", 2 * (request(1).decode() + "\n")], sink)
    await soon(closed.wait())
    await another_session_runs(start)
    assert (len(sink.emitted), len(sink.losses)) == ((1, 0) if moment == "emit" else (2, 1))


# --- what is left behind ----------------------------------------------------------------


async def test_what_a_server_says_while_it_ends_meets_no_broken_pipe(
    start: Open, sink: Recorder, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    backend = await start(child("parting.py", noted))
    assert (await sink.next())["method"] == "ready"
    await soon(backend.close())
    assert noted.read_text() == "said"


async def test_closing_ends_a_server_that_ignores_all_it_is_told_within_5_seconds(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    backend = await start(child("family.py", lifelines.port, "stubborn"))
    await sink.next()
    before = monotonic()
    await soon(backend.close())
    assert monotonic() - before < 5
    await lifelines.dead("child", "grandchild")


async def test_closing_lets_a_server_end_by_itself_first(start: Open, sink: Recorder, tmp_path: Path) -> None:
    done = tmp_path / "done"
    backend = await start(["sh", "-c", f'trap "" TERM; echo "$0"; cat; echo > {done}', request(1).decode()])
    await sink.next()
    await soon(backend.close())
    assert done.exists()


async def test_a_grandchild_does_not_outlive_the_server(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    backend = await start(child("family.py", lifelines.port, "leaves"))
    await sink.next()
    await send(backend, request(1))
    assert "status 0" in await sink.loss()
    await lifelines.dead("child", "grandchild")


async def test_a_grandchild_that_has_left_the_group_cannot_hide_the_server_s_end(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    backend = await start(child("family.py", lifelines.port, "leaves", "apart"))
    await sink.next()
    await send(backend, request(1))
    assert "status 0" in await sink.loss()
    await soon(backend.close())


async def test_nothing_is_left_when_our_own_process_is_killed(lifelines: Lifelines) -> None:
    command = child("family.py", lifelines.port, "stubborn")
    source = str(Path(stdio.__file__).parents[2])
    with subprocess.Popen(  # noqa: ASYNC220 - it must survive whatever becomes of this loop
        [sys.executable, str(CHILDREN / "host.py"), *command], env={**os.environ, "PYTHONPATH": source}
    ) as host:
        try:
            await lifelines.born("child", "grandchild")
        finally:
            host.kill()
    await lifelines.dead("child", "grandchild")


async def test_nothing_is_left_when_the_supervisor_is_killed(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    await start(child("family.py", lifelines.port, "stubborn"))
    os.kill((await sink.next())["params"]["parent"], signal.SIGKILL)
    assert "its supervisor died" in await sink.loss()
    await lifelines.dead("child", "grandchild")


async def test_a_supervisor_that_hangs_is_not_waited_for(
    start: Open, sink: Recorder, lifelines: Lifelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "_PATIENCE", 0.01)
    backend = await start(child("family.py", lifelines.port, "stubborn"))
    os.kill((await sink.next())["params"]["parent"], signal.SIGSTOP)
    await soon(backend.close())
    await lifelines.dead("child", "grandchild")


async def test_a_signal_to_the_supervisor_reaches_the_server(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    await start(child("family.py", lifelines.port))
    os.kill((await sink.next())["params"]["parent"], signal.SIGTERM)
    assert "was killed by SIGTERM" in await sink.loss()
    await lifelines.dead("child", "grandchild")


async def test_a_signal_to_our_terminal_does_not_reach_the_server(
    start: Open, sink: Recorder, lifelines: Lifelines
) -> None:
    await start(child("family.py", lifelines.port))
    supervisor = (await sink.next())["params"]["parent"]
    assert os.getsid(supervisor) == os.getpgid(supervisor) == supervisor


async def test_the_server_does_not_inherit_what_python_ignores(start: Open, sink: Recorder) -> None:
    await start(["sh", "-c", "kill -PIPE $$; exit 3"])
    assert "was killed by SIGPIPE" in await sink.loss()


async def test_sessions_leave_no_descriptors_open(start: Open) -> None:
    await another_session_runs(start)
    before = os.listdir("/dev/fd")
    for _ in range(3):
        await another_session_runs(start)
    assert os.listdir("/dev/fd") == before


# --- what cannot be started -------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        pytest.param(["no-such-ladder"], {}, "cannot start 'no-such-ladder': not found", id="not found"),
        pytest.param(
            ["./no-such-ladder"], {}, "cannot start './no-such-ladder': not found", id="no such path"
        ),
        pytest.param(["cat", "x" * 200_000], {}, "Argument list too long", id="what no reaper starts with"),
        pytest.param([str(CHILDREN)], {}, "Permission denied", id="not executable"),
        pytest.param(["sh"], {"cwd": "/no/such/place"}, "/no/such/place", id="no such directory"),
        pytest.param(
            ["sh"], {"env": {"PATH": "/no/such/place"}}, "cannot start 'sh': not found", id="other PATH"
        ),
    ],
)
async def test_what_cannot_be_started_is_told_at_once(
    sink: Recorder, command: list[str], settings: dict[str, Any], message: str
) -> None:
    backends = StdioBackends(command, **settings)
    with pytest.raises(BackendError) as error:
        await soon(backends.open(sink))
    assert message in str(error.value)
    before = os.listdir("/dev/fd")
    with pytest.raises(BackendError):
        await soon(backends.open(sink))
    assert os.listdir("/dev/fd") == before


async def test_a_start_that_is_cancelled_half_way_leaves_nothing(
    sink: Recorder, lifelines: Lifelines
) -> None:
    opening = asyncio.create_task(StdioBackends(child("idler.py", lifelines.port, "listen")).open(sink))
    for _ in range(200):  # turns of the loop: the reaper runs then, and has said nothing yet
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await lifelines.born("idler")
    await lifelines.dead("idler")


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StdioBackends([])


# --- and on the loop that `serve` uses --------------------------------------------------


def test_all_of_it_works_on_uvloop() -> None:
    async def main(closing: AsyncExitStack) -> None:
        async def start(command: list[str]) -> tuple[Backend, Recorder]:
            sink = Recorder()
            backend = await StdioBackends(command).open(sink)
            closing.push_async_callback(backend.close)
            return backend, sink

        for ending, said in (("3", "status 3"), ("-9", "SIGKILL")):
            backend, sink = await start(child("crash.py", 1, ending))
            await answers(backend, sink)
            await send(backend, request(1))
            assert said in await sink.loss()
        backend, sink = await start(child("giant.py", '{"jsonrpc":"2.0","id":7,"result":"@"}', 10))
        assert (await sink.next())["id"] == 7
        await answers(backend, sink)
        await soon(backend.close())
        assert not sink.losses
        with pytest.raises(BackendError, match="not found"):
            await start(["no-such-ladder"])
        # Where a copy of the pipe slips through to the reaper, this end is never seen.
        _, sink = await start(["sh", "-c", "exec >&-; read line"])
        assert "status" in await sink.loss()

    async def closed() -> None:
        async with AsyncExitStack() as closing:
            await main(closing)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(closed())
