"""What every row shares: pinned processes, their CPU time and memory, rounds, medians.

Linux only. Servers run on core 0 and what loads them on core 1, so that neither takes time from the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

__all__ = [
    "BUILD",
    "HERE",
    "LOAD_CORE",
    "ROOT",
    "SERVER_CORE",
    "Bench",
    "Figure",
    "Message",
    "NotMeasured",
    "Server",
    "WrongEvents",
    "gapless",
    "memory",
    "pin",
    "ratio",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = HERE / ".build"
SERVER_CORE, LOAD_CORE = 0, 1
CHILD = HERE / "servers" / "child.py"
OBJECT = "benchmarks.servers.emitter:server"

T = TypeVar("T")
Message = dict[str, Any]

_LISTENS = 30.0
_NO_DISKS = ("tmpfs", "ramfs", "devtmpfs")
_SETTLE = 0.03
"""Seconds after the last byte, for what a server does when all is sent."""


class NotMeasured(Exception):
    """Why a row has no figures, in words that can go into the table."""


class WrongEvents(Exception):
    """Events were lost, repeated or out of order: the run is worth nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing a row says.

    Attributes:
        what: of what, within the row.
        target: what it is to be; `None` where it is only told.
        sense: on which side of the target it is to be.
        values: one for each round.
        unit: of the values; empty for ratios.
        of: the medians behind a ratio, for people.
    """

    what: str
    target: float | None
    sense: Literal["at least", "at most"]
    values: tuple[float, ...]
    unit: str = ""
    of: str = ""

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return median(self.values)

    @property
    def met(self) -> bool:
        """Whether the median is where it is to be; so is what has no target."""
        if self.target is None:
            return True
        return self.median >= self.target if self.sense == "at least" else self.median <= self.target


def ratio(
    what: str,
    above: Sequence[float],
    below: Sequence[float],
    target: float | None,
    sense: Literal["at least", "at most"],
    told: Callable[[float], str],
) -> Figure:
    """The ratio of two measures, round by round."""
    values = tuple(a / b for a, b in zip(above, below, strict=True))
    return Figure(what, target, sense, values, of=f"{told(median(above))} ÷ {told(median(below))}")


def pin(core: int) -> None:
    """Keep this process, and what it starts, on one core."""
    with suppress(OSError):  # a machine with a single one
        os.sched_setaffinity(0, {core})


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started in the block runs on one core, from its first instruction on."""
    ours = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def memory(pid: int, kind: Literal["Anonymous", "Rss"] = "Anonymous") -> int:
    """Resident bytes of a process's own, heap and stacks; with `Rss` those of files and libraries, too."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise NotMeasured("the kernel does not tell a process's memory")


class Server:
    """A process that is measured; it listens on `port`, if it listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        # The CPU-time clock of another process, as clock_getcpuclockid(3) makes it: user and system time of
        # all its threads, in ns, where /proc/PID/stat has ticks of 10 ms. Its children are not in it.
        self._clock = (~process.pid << 3) | 2

    def cpu(self) -> float:
        """Seconds of CPU so far, user and system, of this process without its children."""
        return time.clock_gettime(self._clock)

    def spent(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds of CPU that a piece of work cost this process, and what came of it."""
        before = self.cpu()
        result = work()
        time.sleep(_SETTLE)
        return self.cpu() - before, result

    def memory(self, kind: Literal["Anonymous", "Rss"] = "Anonymous") -> int:
        """As `memory` of this process."""
        return memory(self.process.pid, kind)

    def stop(self) -> None:
        """End it, and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue
            return


@dataclass(slots=True)
class Bench:
    """One run of a row: how many rounds, and what it runs in them."""

    rounds: int
    quick: bool
    notes: list[str] = field(default_factory=list[str])

    def take(self, measures: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Each measure once to warm up, then all of them in turn, round after round."""
        for measure in measures.values():
            measure()
        taken: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(self.rounds):
            for name, measure in measures.items():
                taken[name].append(measure())
        return taken

    def note(self, text: str) -> None:
        """Say something about a row below the table."""
        self.notes.append(text)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory on the real disk, removed afterwards.

        Raises:
            NotMeasured: the project is not on a disk.
        """
        BUILD.mkdir(exist_ok=True)
        if filesystem(BUILD)[1] in _NO_DISKS:
            raise NotMeasured("the project is in memory (tmpfs): syncing there costs nothing")
        with tempfile.TemporaryDirectory(dir=BUILD, prefix="log-") as name:
            yield Path(name)

    @contextmanager
    def serving(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        core: int = SERVER_CORE,
    ) -> Iterator[Server]:
        """A server on the server's core, from when it listens until the block ends."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=BUILD) as output:
            with on_core(core):
                process = subprocess.Popen(
                    command(port),
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            server = Server(process, port)
            try:
                self._until_it_listens(server)
                yield server
            except (NotMeasured, WrongEvents, OSError):
                output.seek(0)
                sys.stderr.write(output.read().decode(errors="replace")[-2000:])
                raise
            finally:
                server.stop()

    @contextmanager
    def asked(self, program: str, *words: str) -> Iterator[Callable[[str], float]]:
        """A program of `servers/`, on the server's core, that answers each line it is sent with a number."""
        with on_core(SERVER_CORE):
            process = subprocess.Popen(
                [sys.executable, str(HERE / "servers" / program), *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        asking, telling = process.stdin, process.stdout

        def ask(line: str) -> float:
            print(line, file=asking, flush=True)
            return float(telling.readline())

        try:
            yield ask
        finally:
            process.kill()
            process.wait()

    def _until_it_listens(self, server: Server) -> None:
        deadline = time.monotonic() + _LISTENS
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise NotMeasured(f"the server ended with status {server.process.returncode}")
            try:
                socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise NotMeasured(f"the server did not listen within {_LISTENS:.0f} s")

    @contextmanager
    def gapless(
        self,
        *,
        backend: Literal["stdio", "object"] = "stdio",
        log: Literal["full", "memory"] = "full",
        options: Sequence[str] = (),
    ) -> Iterator[Server]:
        """Gapless before the benchmark's own MCP server."""
        with ExitStack() as stack:
            directory = stack.enter_context(self.directory())
            url = "memory:" if log == "memory" else f"sqlite:///{directory / 'gapless.db'}"
            yield stack.enter_context(self.serving(lambda port: gapless(port, url, backend, options)))

    @contextmanager
    def sdk(self) -> Iterator[Server]:
        """The official SDK's server before the same object, with an event store in memory."""
        program = str(HERE / "servers" / "sdk.py")
        with self.serving(lambda port: [sys.executable, program, str(port)]) as server:
            yield server

    @contextmanager
    def floor(self) -> Iterator[Server]:
        """uvicorn before the benchmark's own MCP server, and nothing in between."""
        program = str(HERE / "servers" / "floor.py")
        with self.serving(lambda port: [sys.executable, program, str(port)]) as server:
            yield server

    @contextmanager
    def bare(self) -> Iterator[Server]:
        """The loop that does nothing but sync and send."""
        program = str(HERE / "servers" / "bare.py")
        with self.directory() as directory:
            file = str(directory / "bare.log")
            with self.serving(lambda port: [sys.executable, program, str(port), file]) as server:
                yield server


def gapless(port: int, log: str, backend: str, options: Sequence[str] = ()) -> list[str]:
    """The command that serves the benchmark's MCP server with Gapless."""
    serve = [sys.executable, "-m", "gapless", "serve", "--port", str(port), "--log", log, *options]
    return [*serve, OBJECT] if backend == "object" else [*serve, "--", sys.executable, "-I", str(CHILD)]


def filesystem(path: Path) -> tuple[str, str]:
    """The device a path is on, and its kind of file system."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = {str(path), *map(str, path.parents)}
    device, _, kind = max((m for m in mounts if m[1] in above), key=lambda m: len(m[1]))
    return device, kind


def disk(path: Path) -> str:
    """What kind of disk a path is on, as far as the kernel tells."""
    device, kind = filesystem(path)
    name = Path(device).name
    spins = Path(f"/sys/block/{name}/queue/rotational")
    turning = {"0": "solid-state or virtual", "1": "rotating or virtual"}
    told = turning.get(spins.read_text().strip(), "unknown") if spins.exists() else "unknown"
    return f"{kind} on {name} ({told})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
