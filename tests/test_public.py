"""The public names are there, say what they are, and cost nothing until they are used."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gapless

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(gapless.__path__, "gapless.")
    if not module.name.endswith(("__main__", "reaper"))
)


@pytest.mark.parametrize("name", gapless.__all__)
def test_a_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    found = getattr(gapless, name)
    assert isinstance(found, str) or inspect.getdoc(found)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_exports_exists_and_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ or not Path(module.__file__ or "").read_text()
    for exported in getattr(module, "__all__", ()):
        found = getattr(module, exported)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert inspect.getdoc(found), f"{name}.{exported} has no docstring"


@pytest.mark.parametrize(
    ("use", "unneeded"),
    [
        ("import gapless", ("mcp", "starlette", "apsw", "httpx2", "uvicorn", "typer")),
        ("import gapless; gapless.connect", ("gapless.server", "apsw", "typer")),
        (
            "import gapless; gapless.asgi(['true'], log='memory:')",
            ("mcp", "apsw", "httpx2", "uvicorn", "typer"),
        ),
    ],
)
def test_only_what_is_used_is_imported(use: str, unneeded: tuple[str, ...]) -> None:
    code = f"{use}; import sys; print([name for name in {unneeded!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gapless.nothing
