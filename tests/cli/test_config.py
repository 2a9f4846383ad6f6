"""Options of `gapless serve` from a file and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import Run, Serve
from tests.cli.test_serve import STDIO, opened


def written(folder: Path, text: str) -> str:
    path = folder / "gapless.toml"
    path.write_text(text)
    return str(path)


def test_options_come_from_the_command_line_then_from_variables_then_from_the_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(
        tmp_path,
        f"""
        [serve]
        log = "memory:"
        path = "/from-the-file/mcp"
        max-sessions = 1
        max_message_bytes = 1000
        keepalive = 7.5
        allowed_host = ["127.0.0.1", "a.example"]
        target = {STDIO[1:]}
        """,
    )
    monkeypatch.setenv("GAPLESS_SERVE_MAX_MESSAGE_BYTES", "2000")
    monkeypatch.setenv("GAPLESS_SERVE_KEEPALIVE", "8.5")
    serving = serve("--config", config, "--keepalive", "9.5")
    assert serving.url.endswith("/from-the-file/mcp")
    status, body = opened(serving.url, Host="a.example")
    assert (status, body["limits"]["message"], body["timers"]["keepalive"]) == (201, 2000, 9.5)
    status, body = opened(serving.url)
    assert (status, body["error"]["data"]["reason"]) == (503, "limit")
    assert opened(serving.url, Host="b.example")[0] == 421


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[serve]\nprot = 1\nlogs = 2", "gapless.toml: [serve] has no logs, prot (its names are"),
        ("[serve", "gapless.toml is no TOML: "),
        ("serve = 1", "gapless.toml: serve is no table (write [serve] above the options)"),
        ("[serve]\nconfig = 'x'", "gapless.toml: [serve] has no config"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(run: Run, tmp_path: Path, text: str, told: str) -> None:
    done = run("serve", "--config", written(tmp_path, text))
    assert done.status == 2
    assert told in done.err


def test_a_value_is_checked_as_that_of_an_option_is(run: Run, tmp_path: Path) -> None:
    done = run("serve", "--config", written(tmp_path, "[serve]\nkeepalive = 0"))
    assert done.status == 2
    assert "0 is not above 0" in done.err
    done = run("serve", "--config", str(tmp_path / "none"))
    assert done.status == 2
    assert "No such file or directory (name a TOML file that is there)" in done.err
