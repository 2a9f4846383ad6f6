"""How MCP servers resume a stream that was cut, side by side: `make peers`.

Each peer hosts the same ladder, set up as its own documentation says (the head of each program here
names the page), in an environment of its own under `.build`, which is made on first use. `gapless
torture` cuts and resumes the streams of all of them in the same way, and counts. The table goes to
docs/explanation/peers.md.

    python benchmarks/peers/run.py --only fastmcp --trials 20

Exit status 1 if Gapless itself loses something. What cannot be set up on this machine is in the
table as just that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = HERE / ".build"
PAGE = ROOT / "docs" / "explanation" / "peers.md"

TRIALS = 85
AT_ONCE = 4
"""Peers measured beside one another: each has one session at a time, and mostly waits."""
LISTENS = 60.0
SECONDS = 900
"""No session is begun after so long: one that waits in vain takes half a minute."""
KINDS = ("missing", "repeated", "unanswered")
"""What is in the table, of all that the experiment may find."""

progress = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """A program in a folder here, and where it answers."""

    name: str
    title: str
    folder: str = ""
    program: str = ""
    path: str = "/mcp"


PEERS = (
    Peer("python-sdk", "Python SDK, its example's store", "python-sdk", "server.py"),
    Peer("python-sdk-sqlite", "Python SDK, a SQLite store", "python-sdk", "sqlite.py"),
    # Its application redirects from `/mcp` to there.
    Peer("mcp-persist", "mcp-persist, SQLite", "mcp-persist", "server.py", path="/mcp/"),
    Peer("mcp-persist-proxy", "mcp-persist's proxy, SQLite", "mcp-persist", "proxy.py"),
    Peer("fastmcp", "FastMCP, its own store", "fastmcp", "server.py"),
    Peer("typescript-sdk", "TypeScript SDK, its examples' store", "typescript-sdk", "server.mjs"),
    Peer("typescript-sdk-numbered", "TypeScript SDK, a numbered store", "typescript-sdk", "numbered.mjs"),
    Peer("gapless", "Gapless, SQLite"),
)

PACKAGES = {
    "python-sdk": ("mcp",),
    "mcp-persist": ("mcp-persist", "mcp"),
    "fastmcp": ("fastmcp", "mcp"),
    "typescript-sdk": ("@modelcontextprotocol/server", "@modelcontextprotocol/node"),
}
"""What is measured, of all that a folder installs."""

SDISTS = {
    "python-sdk": ("mcp", "examples/servers/simple-streamablehttp/mcp_simple_streamablehttp/event_store.py"),
}
"""A file that programs import, and that is only in the source distribution of a package."""


class NotMeasured(Exception):
    """Why a peer has no figures, in words that can go into the table."""


@dataclass(slots=True)
class Row:
    """What became of one peer."""

    name: str
    title: str
    versions: str
    trials: int = 0
    resumes: int = 0
    violations: dict[str, int] = field(default_factory=dict[str, int])
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether it was not measured, or anything at all was found wrong."""
        return bool(self.reason) or any(self.violations.values())

    @property
    def kept(self) -> bool:
        """Whether it was measured and nothing was lost."""
        return not self.reason and not any(self.violations.get(kind) for kind in KINDS)

    def rate(self, kind: str) -> str:
        """How many of a kind there were per 1,000 resumes."""
        count = self.violations.get(kind, 0)
        rate = 1000 * count / self.resumes if self.resumes else 0.0
        return f"{rate:.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


# Setting up ---------------------------------------------------------------------------------------------


def pins(folder: str) -> dict[str, str]:
    """The versions that a folder pins."""
    source = HERE / folder
    if (source / "package.json").exists():
        return json.loads((source / "package.json").read_text())["dependencies"]
    return dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (source / "requirements.txt").read_text()))


def versions(peer: Peer) -> str:
    """The versions of what is measured."""
    if not peer.folder:
        return version("gapless")
    pinned = pins(peer.folder)
    return ", ".join(f"{package} {pinned[package]}" for package in PACKAGES[peer.folder])


def run(what: str, command: Sequence[str], cwd: Path) -> None:
    """One step of a set-up. What it printed is shown, but kept out of the table: it names hosts and paths."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"{what} failed ({type(error).__name__})") from error
    if done.returncode:
        progress.print(done.stdout + done.stderr, markup=False, highlight=False, style="dim")
        raise NotMeasured(f"{what} failed")


def set_up(peer: Peer) -> Path:
    """The folder from which a peer runs, made or brought up to date."""
    source, build = HERE / peer.folder, BUILD / peer.folder
    pinned = source / ("package-lock.json" if (source / "package.json").exists() else "requirements.txt")
    ready = build / ".ready"
    is_ready = ready.exists() and ready.read_text() == pinned.read_text()
    if not is_ready and build.exists():
        shutil.rmtree(build)
    shutil.copytree(source, build, dirs_exist_ok=True)
    if is_ready:
        return build
    progress.print(f"setting up {peer.folder} (once)")
    if pinned.name == "package-lock.json":
        if shutil.which("npm") is None or shutil.which("node") is None:
            raise NotMeasured("needs Node.js and npm, which are not installed")
        run("`npm ci`", ["npm", "ci", "--silent", "--no-audit", "--no-fund"], build)
    else:
        run("`python -m venv`", [sys.executable, "-m", "venv", ".venv"], build)
        run(
            "`pip install`",
            [".venv/bin/python", "-m", "pip", "install", "-q", "-r", "requirements.txt"],
            build,
        )
    if peer.folder in SDISTS:
        package, member = SDISTS[peer.folder]
        fetch(package, pins(peer.folder)[package], member, build)
    ready.write_text(pinned.read_text())
    return build


def fetch(package: str, pinned: str, member: str, build: Path) -> None:
    """Take one file out of a package's source distribution."""
    with tempfile.TemporaryDirectory() as directory:
        download = ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", directory]
        run("`pip download`", [".venv/bin/python", "-m", *download, f"{package}=={pinned}"], build)
        with tarfile.open(next(Path(directory).glob("*.tar.gz"))) as archive:
            found = archive.extractfile(f"{package}-{pinned}/{member}")
            assert found is not None
            (build / Path(member).name).write_bytes(found.read())


# Measuring ----------------------------------------------------------------------------------------------


def command(peer: Peer, port: int, directory: Path) -> list[str]:
    """What starts a peer."""
    if not peer.folder:
        serve = [sys.executable, "-m", "gapless", "serve", "--port", str(port)]
        return [*serve, "--log", f"sqlite:///{directory / 'gapless.db'}", "examples.ladder_server:server"]
    build = set_up(peer)
    python = str(build / ".venv" / "bin" / "python")
    interpreter = "node" if peer.program.endswith(".mjs") else python
    return [interpreter, str(build / peer.program), str(port), str(directory)]


@contextmanager
def serving(peer: Peer) -> Iterator[str]:
    """A peer that listens on loopback, until the block ends: its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        start = command(peer, port, directory)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LADDER_JOURNAL": str(directory / "journal"),
        }
        log = directory / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                start, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                wait_until_it_listens(process, port)
                yield f"http://127.0.0.1:{port}{peer.path}"
            except NotMeasured:
                progress.print(
                    log.read_text(errors="replace")[-2000:], markup=False, highlight=False, style="dim"
                )
                raise
            finally:
                stop(process)


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    """Return once a connection to the port is accepted."""
    deadline = time.monotonic() + LISTENS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NotMeasured(f"the server ended with status {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise NotMeasured(f"the server did not listen within {LISTENS:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it started."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def torture(url: str, trials: int) -> dict:
    """The experiment `resume` against a URL, as `gapless torture` reports it.

    One session at a time: how a store tells sessions apart is another question.
    """
    gapless = [sys.executable, "-m", "gapless", "torture", url]
    options = ["--experiment", "resume", "--jobs", "1", "--no-shrink", "--json"]
    bounds = ["--trials", str(trials), "--seconds", str(SECONDS)]
    try:
        done = subprocess.run(
            [*gapless, *options, *bounds],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"`gapless torture` did not end within {2 * SECONDS} s") from error
    try:
        found = {found["name"]: found for found in json.loads(done.stdout)["experiments"]}["resume"]
    except (ValueError, KeyError) as error:
        raise NotMeasured(f"`gapless torture` ended with status {done.returncode} and no figures") from error
    if not found["counts"].get("resumes"):
        raise NotMeasured("nothing was resumed")
    return found


def measure(peer: Peer, trials: int) -> Row:
    """Set one peer up, cut it, and count."""
    row = Row(peer.name, peer.title, versions(peer))
    try:
        with serving(peer) as url:
            progress.print(f"{peer.title}: {trials} trials")
            found = torture(url, trials)
    except NotMeasured as reason:
        row.reason = str(reason)
    else:
        row.trials, row.resumes = found["trials"], found["counts"]["resumes"]
        row.violations = found["violations"]
    return row


# Telling ------------------------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    """A row of the table."""
    if row.reason:
        return [row.title, row.versions, f"not measured: {row.reason}", *[""] * len(KINDS)]
    return [row.title, row.versions, f"{row.resumes:,}", *(row.rate(kind) for kind in KINDS)]


def show(rows: Sequence[Row]) -> None:
    """The table, for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, caption="missing and so on: per 1,000 resumes")
    for heading in ("peer", "version"):
        table.add_column(heading)
    for heading in ("resumes", *KINDS):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*cells(row), style="green" if row.kept else "")
    Console().print(table)


def write(rows: Sequence[Row], trials: int) -> None:
    """The table, for the page."""
    lines = [
        f"| {' | '.join(('peer', 'version', 'resumes', *KINDS))} |",
        f"|---|---|{'---:|' * (1 + len(KINDS))}",
        *(f"| {' | '.join(cells(row))} |" for row in rows),
    ]
    node = (
        subprocess.check_output(["node", "--version"], text=True).strip() if shutil.which("node") else "none"
    )
    taken = (
        f"Measured on {date.today().isoformat()} with Gapless {version('gapless')}, "
        f"Python {platform.python_version()}, Node.js {node} on {platform.system()}: "
        f"up to {trials} sessions each, one at a time. What follows the resumes is per 1,000 of them."
    )
    text = "\n".join([*lines, "", *textwrap.wrap(taken, 100)])
    page = PAGE.read_text()
    begin, end = "<!-- make peers -->\n", "\n<!-- end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{PAGE} has no markers"
    PAGE.write_text(f"{before}{begin}{text}{end}{after}")


def main() -> int:
    """Measure what is asked for; 1 if Gapless lost something or could not be measured."""
    parser = argparse.ArgumentParser(
        description="How MCP servers resume a stream that was cut, side by side."
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--only", choices=names, action="append", help="measure this peer alone; may be repeated"
    )
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"sessions for each peer ({TRIALS})")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, instead of a table")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    peers = [peer for peer in PEERS if not asked.only or peer.name in asked.only]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda peer: measure(peer, asked.trials), peers))
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        show(rows)
    if not asked.only:
        write(rows, asked.trials)
    return int(any(row.name == "gapless" and row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
