"""Ways to run the command; what a test starts ends with the test."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.harness import PATIENCE, ROOT, AtTerminal, Done, Run, Running, Serve, Serving, Start, Terminal


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command to its end."""

    def run(*args: str, cwd: Path = ROOT, seconds: float = PATIENCE) -> Done:
        began = time.monotonic()
        running = Running(*args, cwd=cwd)
        try:
            status = running.ends(seconds)
        finally:
            running.end()
        return Done(status, running.out, running.err, time.monotonic() - began)

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command; it is ended with the test."""
    with ExitStack() as undo:

        def start(*args: str, cwd: Path = ROOT) -> Running:
            running = Running(*args, cwd=cwd)
            undo.callback(running.end)
            return running

        yield start


@pytest.fixture
def terminal() -> Iterator[AtTerminal]:
    """Start a command at a terminal; it is ended with the test."""
    with ExitStack() as undo:

        def terminal(*args: str, **variables: str) -> Terminal:
            made = Terminal(*args, **variables)
            undo.callback(made.end)
            return made

        yield terminal


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start to serve; it is ended with the test."""
    with ExitStack() as undo:

        def serve(*args: str, cwd: Path = ROOT) -> Serving:
            serving = Serving(*args, cwd=cwd)
            undo.callback(serving.end)
            serving.wait()
            return serving

        yield serve


@pytest.fixture(scope="session")
def ladder() -> Iterator[str]:
    """The URL of the example server, in process, with a log in memory; for tests that do it no harm."""
    serving = Serving("--log", "memory:", "examples.ladder_server:server")
    try:
        serving.wait()
        yield serving.url
        serving.process.send_signal(signal.SIGTERM)
        assert serving.ends() == 0, serving.err
    finally:
        serving.end()
