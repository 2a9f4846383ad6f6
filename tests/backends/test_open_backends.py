"""What people have (a command, a name, a server object) becomes a factory, or a line that says why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.server import MCPServer, Server

from gapless.backends import open_backends
from gapless.backends.http import HttpBackends
from gapless.backends.sdk import SdkBackends
from gapless.backends.stdio import StdioBackends
from gapless.errors import UsageError


@pytest.mark.parametrize("command", [["cat"], ("cat", "-u")])
def test_a_command_is_a_stdio_server(command: Any) -> None:
    assert isinstance(open_backends(command), StdioBackends)


@pytest.mark.parametrize("server", [MCPServer("a"), Server("b")])
def test_an_object_of_the_sdk_is_a_server_in_process(server: object) -> None:
    assert isinstance(open_backends(server), SdkBackends)


def test_a_name_is_imported() -> None:
    assert isinstance(open_backends("examples.ladder_server:server"), SdkBackends)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/mcp", "HTTPS://example.com/mcp"])
def test_a_url_is_a_server_upstream(url: str) -> None:
    assert isinstance(open_backends(url, headers={"Authorization": "Bearer x"}), HttpBackends)


def test_headers_are_for_a_url() -> None:
    with pytest.raises(UsageError, match="headers for a server that is not at a URL"):
        open_backends(["cat"], headers={"Authorization": "Bearer x"})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([], "an empty command"),
        (["cat", 1], "not all strings"),
        ("cat", "'cat' names no server"),
        ("cat -u", "names no server"),
        ("./server.py:server", "names no server"),
        ("examples.ladder_server:", "names no server"),
        (":server", "names no server"),
        ("no_such_module:server", "no module named 'no_such_module'"),
        ("examples.no_such_module:server", "no module named 'examples.no_such_module'"),
        ("examples.ladder_server.deeper:server", "no module named 'examples.ladder_server.deeper'"),
        ("examples.ladder_server:no_such_server", "has no attribute 'no_such_server'"),
        ("examples.ladder_server:climb", "function is no MCP server"),
        (7, "int is no MCP server"),
        ("http://", "no URL of a server"),
    ],
)
def test_what_is_no_server_is_refused_with_a_way_out(target: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        open_backends(target)
    assert error.value.hint


def test_what_a_module_fails_to_import_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_server.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        open_backends("broken_server:server")


def test_the_sdk_is_not_imported_for_a_command() -> None:
    program = (
        "import sys; from gapless.backends import *; open_backends(['cat']); sys.exit('mcp' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
