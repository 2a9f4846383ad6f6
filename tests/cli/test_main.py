"""`gapless` itself: help, version, misuse."""

from __future__ import annotations

import re

import pytest

import gapless
from tests.cli.harness import AtTerminal, Run

COMMANDS = ["serve", "call", "sessions", "sessions list", "sessions show", "sessions end", "version"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_ends_with_examples_to_try(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.status == 0, done.err
    examples = done.out.partition("Examples")[2]
    assert f"$ gapless {command}".rstrip() in examples
    assert "\x1b[" not in done.out


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    done = run()
    assert "serve" in done.out + done.err
    assert "Examples" in done.out + done.err


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_the_version_is_told(run: Run, asked: str) -> None:
    done = run(asked)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"gapless {gapless.__version__} (mcp 2.")
    assert done.out.count("\n") == 1


def test_an_unknown_command_is_misuse(run: Run) -> None:
    done = run("sevre")
    assert done.status == 2
    assert "sevre" in done.err
    assert "Traceback" not in done.err


def test_debug_shows_where_an_error_comes_from(run: Run) -> None:
    done = run("--debug", "serve", "no_such_module:server")
    assert done.status == 1
    assert "Traceback" in done.err
    assert "UsageError" in done.err


def test_no_color_is_honoured(terminal: AtTerminal) -> None:
    colour = re.compile(r"\x1b\[([0-9;]*;)?[34][0-8][;m]")
    for command in (["sessions", "list", "--log", "memory:"], ["--help"]):
        coloured, plain = terminal(*command), terminal(*command, NO_COLOR="1")
        assert coloured.ends() == plain.ends()
        assert colour.search(coloured.seen)
        assert not colour.search(plain.seen)
        assert "gapless" in plain.seen
