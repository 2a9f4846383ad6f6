"""The server under attack: a process of its own, what it holds, and what it has said."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "Held", "Process", "complaints"]

ROOT: Final = Path(__file__).resolve().parents[2]

_START: Final = 30.0
"""Seconds that a server has until it says where it serves."""
_BAD: Final = re.compile(
    r"Traceback \(|never retrieved|never awaited|Exception in|Exception ignored|Fatal|[Uu]nhandled"
)
_PLACE: Final = re.compile(r'\s+File ".*?/?([\w.-]+\.pyx?)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: resident bytes, descriptors, threads, and processes of its own."""

    memory: int
    descriptors: int
    threads: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Held | None:
        """What it holds now, where there is a /proc to read that from."""
        here = Path("/proc") / str(pid)
        try:
            status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
            memory = int(status["VmRSS"].split()[0]) * 1024
            children = (here / "task" / str(pid) / "children").read_text().split()
            return cls(memory, len(os.listdir(here / "fd")), int(status["Threads"]), len(children))
        except (OSError, KeyError):
            return None


class Process:
    """A server that was started with a command; it says `http://…` on stderr once it serves.

    Attributes:
        url: what it said.
    """

    def __init__(self, command: Sequence[str], said: Path) -> None:
        self._command = command
        self._said = said
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Its process ID."""
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        """Where it listens, on loopback."""
        return int(self.url.split(":")[2].split("/", maxsplit=1)[0])

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.returncode is None

    def held(self) -> Held | None:
        """What it holds now."""
        return Held.of(self.pid)

    def said(self) -> str:
        """All that it has said on stderr."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    async def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: it ended, or said nothing in time.
        """
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        with self._said.open("wb") as said:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        for _ in range(int(_START / 0.05)):
            found = re.search(r"http://[^\s,]+:\d+/mcp", self.said())
            if found is not None:
                self.url = found[0]
                return
            if not self.runs:
                break
            await asyncio.sleep(0.05)
        await self.kill()
        raise RuntimeError(f"the server did not start: {self.said()[-1000:]}")

    async def stop(self, seconds: float) -> int | None:
        """Ask it to end; its exit status, `None` if it takes longer."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), seconds)
        return None

    async def kill(self) -> None:
        """End it, and what it has started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def gapless(log: str, *words: str, **limits: float) -> list[str]:
    """The command for `gapless serve`."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    return [sys.executable, "-m", "gapless", "serve", "--port", "0", "--log", log, *options, *words]


def complaints(said: str) -> tuple[list[tuple[str, str]], Counter[str]]:
    """What a server must never say, where it comes from and in full; and how often it said what else."""
    lines = said.splitlines()
    found: list[tuple[str, str]] = []
    for n, line in enumerate(lines):
        if _BAD.search(line) is None:
            continue
        end = n + 1
        while end < len(lines) and lines[end].startswith((" ", "\t")):
            end += 1
        places = _PLACE.findall("\n".join(lines[n:end]))
        where = f"{places[-1][0]}:{places[-1][1]} " if places else ""
        what = lines[end] if "Traceback" in line and end < len(lines) else line
        found.append((where + _shape(what), "\n".join(lines[n : end + 1])))
    return found, Counter(map(_shape, lines))


def _shape(line: str) -> str:
    return re.sub(r"0x[0-9a-f]+|[\w-]{20,}|\d+", "N", line)[:120]
