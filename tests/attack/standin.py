"""A server with one fault, for the judge to find: `python -m tests.attack.standin MANNER`.

Its good manners are those of a strict HTTP server: it refuses everything, and says why.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any

from gapless.protocol.refusal import Reason, Refusal
from tests.attack.shapes import request
from tests.attack.strict import Rest, read_requests

_KEPT: list[Any] = []


def answer(status: str, body: bytes, kind: str = "application/json", *, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def refusal(manner: str) -> bytes:
    """What a request is answered with."""
    body = Refusal(Reason.SESSION_UNKNOWN, "nobody is here").body()
    match manner:
        case "breaks":
            return answer("500 Internal Server Error", b"Internal Server Error", "text/plain")
        case "is-busy":
            return answer("503 Service Unavailable", b"later", "text/plain")
        case "tells-traces":
            return answer("404 Not Found", body.replace(b"nobody", b"Traceback (most recent call last)"))
        case "gives-no-reason":
            return answer("404 Not Found", b"Not Found", "text/plain")
        case "answers-twice":
            return answer("404 Not Found", body) * 2
        case "answers-inside":
            return answer("404 Not Found", body)[:-20] + answer("404 Not Found", body)
        case _:
            return answer("404 Not Found", body)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, manner: str) -> None:
    data, done = b"", 0
    match manner:
        case "keeps-descriptors":
            _KEPT.append(open(os.devnull))  # noqa: SIM115, ASYNC230
        case "keeps-memory":
            _KEPT.append(b"x" * 400_000)
        case "keeps-threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "keeps-children":
            _KEPT.append(subprocess.Popen(["sleep", "60"]))  # noqa: ASYNC220
        case "prints-traces":
            try:
                raise ValueError("found")
            except ValueError:
                traceback.print_exc()
        case _:
            pass
    while more := await reader.read(65536):
        data += more
        sent = read_requests(data)
        if data.startswith(b"GET /metrics"):
            gauge = b'gapless_sessions{state="SSE_ACTIVE"} %d\n' % (manner == "keeps-sessions")
            writer.write(answer("200 OK", gauge, "text/plain"))
        elif data == request(b"GET", b"/healthz") and manner != "hangs":
            writer.write(answer("200 OK", b"ok", "text/plain"))
        elif manner != "hangs":
            for method in sent.methods[done:]:
                whole = refusal(manner)
                writer.write(whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == b"HEAD" else whole)
            if sent.rest == Rest.MORE and manner == "answers-anything":
                writer.write(refusal(manner))
        done = len(sent.methods)
        if sent.rest in (Rest.CLOSED, Rest.OTHER) and manner != "hangs":
            break
    else:
        if manner == "hangs-on":
            await asyncio.Event().wait()
    writer.close()


async def main(manner: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer, manner)
        except OSError:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set if manner != "stays" else lambda: None)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp", file=sys.stderr, flush=True)
    await over.wait()
    os._exit(3 if manner == "ends-badly" else 0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
