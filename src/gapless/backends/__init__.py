"""The MCP servers that Gapless carries: what is behind a session.

`open_backends` turns what people have into a factory of them:

- a command, as a list of strings: a stdio server, one process per session
- `"https://host/mcp"`: a Streamable HTTP server, one session there for each of ours
- `"module:attribute"`: a server object of the official SDK, imported
- such an object itself (`MCPServer` or the low-level `Server`): served in this process

The SDK is imported for the latter two only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, cast

from gapless.backends.base import BackendFactory
from gapless.errors import UsageError

__all__ = ["open_backends"]

DEFAULT_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024


def open_backends(
    target: Sequence[str] | object,
    *,
    headers: Mapping[str, str] | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> BackendFactory:
    """The factory for `target`; nothing is started yet.

    `headers` go with every request to a URL. Of a server in another process no message above
    `max_message_bytes` is read (W5).

    Modules are looked up as `import` does: whoever wants the current directory searched puts it
    on `sys.path`. What a module raises while it is imported is raised as it is.

    Raises:
        UsageError: an empty command, no such module or attribute, no MCP server, no URL of one; or
            headers that are none, or that are given with something else than a URL.
    """
    if isinstance(target, str) and target.lower().startswith(("http://", "https://")):
        from gapless.backends.http import HttpBackends

        return HttpBackends(target, headers=headers, max_message_bytes=max_message_bytes)
    if headers:
        raise UsageError("headers for a server that is not at a URL", hint="pass https://host/mcp, or none")
    if isinstance(target, str):
        target = _load(target)
    elif isinstance(target, list | tuple):
        command = cast("Sequence[object]", target)
        if not all(isinstance(word, str) for word in command):
            raise UsageError("a command that is not all strings", hint="pass the program and its arguments")
        from gapless.backends.stdio import StdioBackends

        return StdioBackends(cast("Sequence[str]", command), max_message_bytes=max_message_bytes)
    from gapless.backends.sdk import SdkBackends

    return SdkBackends(target)


def _load(name: str) -> object:
    module, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(
            f"{name!r} names no server",
            hint="write module:attribute, https://host/mcp, or a command as a list",
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Of the module itself or a package it is in; what *it* fails to import is its own error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"no module named {error.name!r}", hint="run from its directory or install it"
        ) from None
    try:
        return attrgetter(attribute)(found)
    except AttributeError:
        raise UsageError(
            f"{module!r} has no attribute {attribute!r}", hint="name the variable that holds the server"
        ) from None
