"""The real command, as a process of its own: what it prints is waited for, and it never outlives its test."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = [
    "LADDER",
    "PATIENCE",
    "ROOT",
    "AtTerminal",
    "Done",
    "Run",
    "Running",
    "Serve",
    "Serving",
    "Start",
    "Terminal",
]

ROOT = Path(__file__).resolve().parents[2]
LADDER = ROOT / "examples" / "ladder_server.py"

_COLOURS = {"FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"}
PATIENCE = 30.0
"""Seconds that anything may take on a busy machine."""


def environment() -> dict[str, str]:
    """Ours, without what would colour output or lead away from this machine."""
    kept = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    if "PYTHONPATH" in kept:  # commands start elsewhere
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    return {
        **kept,
        "TERM": "dumb",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "PYTHONUTF8": "1",
        "NO_PROXY": "127.0.0.1",
    }


class Running:
    """A command that runs. Its output is read as it comes, so that it never waits for us."""

    def __init__(self, *args: str, cwd: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "gapless", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=cwd,
            env=environment(),
        )
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=[name, pipe], daemon=True)
            for name, pipe in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                with self._changed:
                    self._lines[name].append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def out(self) -> str:
        """What it has printed."""
        return "".join(self._lines["out"])

    @property
    def err(self) -> str:
        """What it has said on stderr."""
        return "".join(self._lines["err"])

    def says(self, words: str, seconds: float = PATIENCE) -> str:
        """Wait until a line on stderr has `words` in it; that line."""

        def found() -> str | None:
            return next((line for line in self._lines["err"] if words in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._readers[1].is_alive(), seconds)
            line = found()
        assert line is not None, f"it never said {words!r}: {self.err}"
        return line.rstrip("\n")

    def ends(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        return status

    def end(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for reader in self._readers:
            reader.join(5)


class Serving(Running):
    """`gapless serve`, once it serves."""

    def __init__(self, *args: str, cwd: Path = ROOT) -> None:
        super().__init__("serve", "--port", "0", *args, cwd=cwd)
        self.url = ""

    def wait(self) -> None:
        """Until it says where it serves."""
        found = re.search(r"http://\S+/mcp\b", self.says("Ctrl-C stops it"))
        assert found is not None, self.err
        self.url = found[0]


class Terminal:
    """A command whose three streams are a terminal."""

    def __init__(self, *args: str, **variables: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        variables = {**environment(), "TERM": "xterm-256color", "NO_COLOR": "", **variables}
        del variables["COLUMNS"]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "gapless", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=variables,
            start_new_session=True,
        )
        os.close(theirs)
        self._ours = ours
        self.seen = ""

    def reads(self, words: str, seconds: float = PATIENCE) -> None:
        """Wait until `words` have appeared."""
        deadline = time.monotonic() + seconds
        while words not in self.seen and self._more(deadline):
            pass
        assert words in self.seen, self.seen

    def types(self, text: str) -> None:
        """Type."""
        os.write(self._ours, text.encode())

    def ends(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; its exit status."""
        deadline = time.monotonic() + seconds
        while self._more(deadline):
            pass
        return self.process.wait(5)

    def end(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # on Linux: the terminal has no other end any more
            data = b""
        self.seen += data.decode(errors="replace")
        return bool(data)


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str
    seconds: float


Run = Callable[..., Done]
Start = Callable[..., Running]
Serve = Callable[..., Serving]
AtTerminal = Callable[..., Terminal]
