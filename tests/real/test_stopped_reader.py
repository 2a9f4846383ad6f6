"""Clients that stop reading while their MCP servers say all they can: that costs a socket, and no memory."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any, Final

import httpx2

from gapless.cli.target import serving
from gapless.torture.door import DoorSession
from gapless.torture.trial import Trace
from tests.soak.sampling import resident

_MIB: Final = 2**20
_FLOODING: Final = str(Path(__file__).with_name("flooding_server.py"))
_PAD: Final = 4096
_KEPT: Final = 8 * _MIB
_WARM: Final = 4 * _KEPT
"""Bytes of events after which each session has its log full, and what caches has its fill."""
_SECONDS: Final = 20.0
_LOOKS: Final = 200
_LEAST: Final = 32 * _MIB
"""Bytes of events that are emitted meanwhile at least, or nothing is shown: sixteen times the bound."""
_MOST: Final = 2 * _MIB
"""Bytes more that are held in the second half of that time than in the first, ten seconds before, at most."""
_FRUGAL: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""With these glibc gives back what is freed, so that what is seen is what is held."""
_CALL: Final[dict[str, Any]] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "flood"},
}


class _Watched:
    """What a server says of itself."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self._url = httpx2.URL(url).join("/metrics")
        self._http = http

    async def number(self, metric: str) -> int:
        text = (await self._http.get(self._url)).text
        found = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return int(float(found[1]))

    async def emitted(self) -> int:
        """Bytes of events that are durable."""
        return await self.number("gapless_events_total") * _PAD

    async def emits(self, least: int) -> None:
        """Wait until so much is emitted."""
        while True:
            if await self.emitted() >= least:
                return
            await asyncio.sleep(0.1)


async def _bind(session: DoorSession) -> None:
    """Through the door, and on the other side of it: the gap is acknowledged."""
    knocked = await session.knock(session.cursor)
    assert knocked.frames is not None
    while session.seq < (knocked.echo or 0):
        block = await knocked.frames.next()
        assert block is not None
        session.take(block)
    await knocked.frames.ack(session.cursor)


async def test_readers_that_stop_cost_no_memory_at_full_emission(tmp_path: Path) -> None:
    """An event stream and a WebSocket stay open, and are not read."""
    retain = ("--retain-bytes", str(_KEPT))
    log = ("--log", f"sqlite:///{tmp_path / 'log.db'}?synchronous=off")
    backend = ("--", sys.executable, "-I", "-S", _FLOODING, str(_PAD))
    async with (
        serving((*log, *retain, *backend), **_FRUGAL) as (url, pid),
        httpx2.AsyncClient(trust_env=False) as http,
        DoorSession(url, Trace()) as listening,
        DoorSession(url, Trace()) as bound,
    ):
        watched = _Watched(url, http)
        await asyncio.gather(listening.open(), bound.open())
        await _bind(bound)
        async with listening.events():
            await asyncio.gather(*(session.post(_CALL) for session in (listening, bound)))
            await watched.emits(_WARM)
            before, held = await watched.emitted(), list[int]()
            for _ in range(_LOOKS):
                held.append(resident(pid))
                await asyncio.sleep(_SECONDS / _LOOKS)
            said = await watched.emitted() - before
            for medium in ("events", "socket"):
                assert await watched.number(f'gapless_connections{{medium="{medium}"}}') == 1
    # What is under way comes and goes by some MiB from look to look; what is held is the least of them.
    grown = min(held[_LOOKS // 2 :]) - min(held[: _LOOKS // 2])
    assert said >= _LEAST, f"no full emission: {said / _MIB:.1f} MiB"
    assert grown <= _MOST, f"{grown / _MIB:.1f} MiB more memory for {said / _MIB:.0f} MiB of events"
