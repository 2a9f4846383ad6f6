"""Elicitation at the terminal: a server's question becomes a few lines to fill in."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final, cast

from mcp.client.session import ElicitationFnT
from mcp.types import ElicitRequestParams, ElicitRequestURLParams, ElicitResult
from rich.markup import escape

from gapless.cli.display import Display
from gapless.cli.output import err, interactive, say

__all__ = ["asker"]

_YES: Final = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}

_Schema = dict[str, Any]
_Value = str | int | float | bool | list[str] | None


def asker(display: Display) -> ElicitationFnT:
    """What the SDK calls with a server's question. Without a terminal to ask at, it is declined."""

    async def ask(context: object, params: ElicitRequestParams) -> ElicitResult:
        if not (sys.stdin.isatty() and interactive()):
            say(f"the server asked: {params.message} (declined: there is no terminal to ask at)")
            return ElicitResult(action="decline")
        with display.paused():
            err.print(f"[bold]{escape(params.message)}[/bold] [dim](Ctrl-D declines)[/dim]")
            try:
                if isinstance(params, ElicitRequestURLParams):
                    return await _visit(params.url)
                return ElicitResult(action="accept", content=await _fill_in(params.requested_schema))
            except EOFError:
                err.print("declined")
                return ElicitResult(action="decline")

    return ask


async def _visit(url: str) -> ElicitResult:
    err.print(f"It wants you to open {escape(url)}", soft_wrap=True)
    agreed = await _field("Agreed", {"type": "boolean"}, required=True)
    return ElicitResult(action="accept" if agreed else "decline")


async def _fill_in(schema: _Schema) -> dict[str, _Value]:
    required = cast("list[str]", schema.get("required", []))
    content: dict[str, _Value] = {}
    for name, field in cast("dict[str, _Schema]", schema.get("properties", {})).items():
        value = await _field(str(field.get("title", name)), field, required=name in required)
        if value is not None:
            content[name] = value
    return content


async def _field(title: str, schema: _Schema, *, required: bool) -> _Value:
    """One value, asked for until it fits; `None` where it may be left out, and was."""
    default = cast("_Value", schema.get("default"))
    hints = [str(schema["description"])] if "description" in schema else []
    hints += ["/".join(_choices(schema))] if _choices(schema) else [str(schema.get("type", "string"))]
    hints += [f"default {default}"] if default is not None else [] if required else ["may be empty"]
    while True:
        err.print(f"{escape(title)} [dim]({escape(', '.join(hints))})[/dim]: ", end="", soft_wrap=True)
        text = (await _line()).strip()
        if not text and (default is not None or not required):
            return default
        try:
            return _read(text, schema)
        except ValueError as error:
            err.print(str(error), style="red", markup=False)


def _read(text: str, schema: _Schema) -> _Value:
    choices = _choices(schema)
    match schema.get("type"):
        case "integer" | "number" as kind:
            try:
                return int(text) if kind == "integer" else float(text)
            except ValueError:
                raise ValueError(f"{text!r} is no {kind}") from None
        case "boolean":
            if text.lower() not in _YES:
                raise ValueError("answer yes or no")
            return _YES[text.lower()]
        case "array":
            words = [word.strip() for word in text.split(",") if word.strip()]
            if not set(words) <= set(choices):
                raise ValueError(f"some of {', '.join(choices)}, with commas between them")
            return words
        case _:
            if choices and text not in choices:
                raise ValueError(f"one of {', '.join(choices)}")
            return text


def _choices(schema: _Schema) -> list[str]:
    if schema.get("type") == "boolean":
        return ["yes", "no"]
    schema = cast("_Schema", schema.get("items", schema))
    titled = cast("list[_Schema]", schema.get("oneOf", schema.get("anyOf", [])))
    return cast("list[str]", schema.get("enum", [choice["const"] for choice in titled if "const" in choice]))


async def _line() -> str:
    """A line from the terminal, while the session goes on: the event loop must not wait for fingers.

    Raises:
        EOFError: there is none.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sys.stdin, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
