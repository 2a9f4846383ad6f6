"""The Autobahn suite against an echo behind the connections of `gapless serve`: `make autobahn`.

Of its cases, those of compression are left out: this server never agrees to any. kosoku runs them; it is
installed where `--suite` says. Exits with 1 if a case fails that is not known to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn

from gapless.cli.connections import Handshakes, Requests
from gapless.cli.loop import loop_factory
from gapless.protocol.refusal import Reason
from gapless.protocol.settings import Limits

KNOWN: Final = {"7.1.5": "websockets answers a close within a fragmented message with 1002; 1000 is expected"}
_FINE: Final = ("OK", "NON-STRICT", "INFORMATIONAL")
_LARGEST: Final = 64 * 1024 * 1024
_SECONDS: Final = 600.0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Say what was said, as long as it is said."""
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})
    while (heard := await receive())["type"] == "websocket.receive":
        said = {key: heard[key] for key in ("text", "bytes") if heard.get(key) is not None}
        await send({"type": "websocket.send", **said})


def _uncounted(_: Reason) -> None:
    pass


async def judge(suite: Path, reports: Path) -> dict[str, str]:
    """Serve the echo, and have the suite judge it; what came of each case."""
    requests = partial(Requests, Limits(), 1000, _uncounted)
    config = uvicorn.Config(
        echo,
        http=cast("Any", requests),
        ws=cast("Any", partial(Handshakes, _uncounted)),
        ws_ping_interval=None,
        ws_max_size=_LARGEST,
        lifespan="off",
        log_level="warning",
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    options = ["-p", "2", "-x", "12.*", "-x", "13.*", "-o", reports]
    try:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, suite / "bin" / "kosoku", *options, address),
            env={"PYTHONPATH": str(suite)},
            stdout=subprocess.DEVNULL,
        )
        async with asyncio.timeout(_SECONDS):
            await running.wait()
    finally:
        server.should_exit = True
        await serving
    (found,) = json.loads((reports / "index.json").read_text()).values()
    return {case: about["behavior"] for case, about in found.items()}


def main() -> int:
    """Print what came of it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, required=True, help="where kosoku is installed")
    parser.add_argument("--reports", type=Path, required=True, help="where the suite's reports go")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        cases = runner.run(judge(options.suite, options.reports))
    for behavior, count in Counter(cases.values()).most_common():
        print(f"{count:5} {behavior}")
    failed = {case for case, behavior in cases.items() if behavior not in _FINE}
    for case in sorted(failed):
        print(f"{case}: {KNOWN.get(case, 'not known to fail')}")
    if not cases or failed - KNOWN.keys():
        return 1
    print(f"{len(cases)} cases: none failed that is not known to")
    return 0


if __name__ == "__main__":
    sys.exit(main())
