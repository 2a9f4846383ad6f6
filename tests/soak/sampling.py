"""What a server process holds, looked at from outside: /proc, its log, its own /metrics."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx2

__all__ = ["Sampler", "busy", "descendants", "resident"]

_EVERY: Final = 1.0
_GAUGES: Final = {
    "sessions": "gapless_sessions",
    "connections": "gapless_connections",
    "tasks": "gapless_tasks",
}
"""What is read off /metrics, summed over labels; one that the server does not have is not watched."""


def resident(pid: int) -> int:
    """A process's resident memory, in bytes."""
    return _status(pid)["VmRSS"] * 1024


def busy(pid: int) -> float:
    """Seconds that a process has had a processor: what its work costs, on a machine with other work too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def _status(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", text, re.MULTILINE)}


class Sampler:
    """Looks at one server, once a second while `run` runs.

    Attributes:
        series: what was seen, by name, with the seconds since the first look.
    """

    def __init__(self, url: str, pid: int, log: Path) -> None:
        self.series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._metrics = httpx2.URL(url).join("/metrics")
        self._pid = pid
        self._log = sqlite3.connect(log, isolation_level=None)
        self._wal = log.with_name(f"{log.name}-wal")
        self._began = time.monotonic()
        self._http = httpx2.AsyncClient(trust_env=False, timeout=30.0)

    async def close(self) -> None:
        """Look no more."""
        self._log.close()
        await self._http.aclose()

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            at = time.monotonic() - self._began
            for name, value in (await self.look()).items():
                self.series[name].append((at, value))
            await asyncio.sleep(_EVERY)

    async def look(self) -> dict[str, float]:
        """What there is now."""
        text = (await self._http.get(self._metrics)).text
        status = _status(self._pid)
        return {
            "memory": status["VmRSS"] * 1024,
            "descriptors": len(os.listdir(f"/proc/{self._pid}/fd")),
            "threads": status["Threads"],
            "children": len(descendants(self._pid)),
            "graves": self._count("session"),
            "segments": self._count("segment"),
            "wal": self._wal.stat().st_size,
            **{name: gauge for name, metric in _GAUGES.items() if (gauge := _sum(text, metric)) is not None},
        }

    def _count(self, table: str) -> int:
        """Rows of the log: of its inboxes none, for they are kept for as long as their sessions live."""
        return self._log.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def _sum(text: str, metric: str) -> float | None:
    found = re.findall(rf"^{metric}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else None
