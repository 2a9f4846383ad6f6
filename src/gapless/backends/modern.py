"""What the 2026-07-28 revision wants beside a message over HTTP: headers that repeat parts of it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from gapless.protocol.jsonrpc import Envelope

__all__ = ["Modern", "header_value"]

_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
_NAMED_BY: Final = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PLAIN: Final = re.compile(r"(?!=\?base64\?)[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_DEEPEST: Final = 32

_Path = tuple[str, ...]


class _Params(msgspec.Struct):
    meta: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="_meta")
    name: Any = None
    uri: Any = None
    arguments: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    params: _Params = msgspec.field(default_factory=_Params)


class _Tool(msgspec.Struct):
    name: str
    inputSchema: Any = None


class _Tools(msgspec.Struct):
    tools: list[_Tool] = []


class _Listing(msgspec.Struct):
    result: _Tools | None = None


class Modern:
    """The headers of 2026-07-28 messages, and the tools that want arguments repeated in them.

    One is shared by all sessions of an upstream server: a tool is listed once and called by many.
    """

    def __init__(self) -> None:
        self._params: dict[str, dict[_Path, str]] = {}

    def headers(self, data: bytes, envelope: Envelope) -> dict[str, str] | None:
        """The headers of a request; `None` if it is of an earlier revision."""
        if b"protocolVersion" not in data:
            return None
        try:
            params = msgspec.json.decode(data, type=_Message).params
        except (msgspec.DecodeError, RecursionError):
            return None
        version = params.meta.get(_VERSION)
        if not isinstance(version, str):
            return None
        assert envelope.method is not None
        headers = {"MCP-Protocol-Version": header_value(version), "Mcp-Method": header_value(envelope.method)}
        name = getattr(params, _NAMED_BY.get(envelope.method, ""), None)
        if isinstance(name, str):
            headers["Mcp-Name"] = header_value(name)
            if envelope.method == "tools/call":
                headers |= self._arguments(name, params.arguments)
        return headers

    def learn(self, listing: bytes) -> None:
        """Note which arguments the tools of a `tools/list` answer want repeated."""
        if b'"x-mcp-header"' not in listing:
            return
        try:
            result = msgspec.json.decode(listing, type=_Listing).result
        except (msgspec.DecodeError, RecursionError):
            return
        for tool in result.tools if result is not None else []:
            self._params[tool.name] = dict(_annotated(tool.inputSchema, ()))

    def _arguments(self, tool: str, arguments: msgspec.Raw) -> dict[str, str]:
        wanted = self._params.get(tool)
        if not wanted or not arguments:
            return {}
        given = msgspec.json.decode(arguments)
        found = {token: _scalar(_at(given, path)) for path, token in wanted.items()}
        return {f"Mcp-Param-{token}": header_value(text) for token, text in found.items() if text is not None}


def _annotated(schema: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    """The properties that bear `x-mcp-header`, by the chain of properties that leads there."""
    if not isinstance(schema, dict) or len(path) > _DEEPEST:
        return
    node = cast("dict[str, Any]", schema)
    token = node.get("x-mcp-header")
    if path and isinstance(token, str) and _TOKEN.fullmatch(token):
        yield path, token
    properties = node.get("properties")
    if isinstance(properties, dict):
        for name, below in cast("dict[str, Any]", properties).items():
            yield from _annotated(below, (*path, name))


def _at(node: Any, path: _Path) -> Any:
    for key in path:
        if not isinstance(node, Mapping):
            return None
        node = cast("Mapping[str, Any]", node).get(key)
    return node


def _scalar(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def header_value(text: str) -> str:
    """A text as a header may carry it: as it is, or in base64 where HTTP would not keep it."""
    if _PLAIN.fullmatch(text) or not text:
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="
