"""`gapless call`: a tool, through our client."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from rich.markup import escape

from gapless.cli.headers import Headers, read_headers
from gapless.cli.output import err, examples, print_json, print_table, say, table
from gapless.errors import ConnectionGaveUpError, GaplessError, UsageError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

    from gapless.cli.display import Display
    from gapless.client.driver import Observation

__all__ = ["CALL_EXAMPLES", "call"]

CALL_EXAMPLES: Final = examples(
    "gapless call http://127.0.0.1:8000/mcp                # which tools are there?",
    "gapless call http://127.0.0.1:8000/mcp climb '{\"steps\": 5}'",
    "gapless call http://127.0.0.1:8000/mcp climb --watch",
)

_OPENING: Final = 10.0
"""Seconds for a session to be opened, where packets vanish rather than bounce."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line asks for."""

    url: str
    tool: str | None
    arguments: dict[str, Any]
    json: bool
    watch: bool
    upgrade: Literal["auto", "never", "require"]
    mode: Literal["auto", "legacy"]
    state: str | None
    receipts: str | None
    timeout: float | None
    headers: dict[str, str]


def call(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server: http://127.0.0.1:8000/mcp, for example.")
    ],
    tool: Annotated[
        str | None, typer.Argument(metavar="TOOL", help="The tool; without it, all are listed.")
    ] = None,
    arguments: Annotated[
        str | None, typer.Argument(metavar="JSON", help="Its arguments, as a JSON object.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, as it came.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show how cursor and transport move.")] = False,
    upgrade: Annotated[
        Literal["auto", "never", "require"],
        typer.Option(help="Move to a WebSocket: if it can be done, never, or fail without."),
    ] = "auto",
    mode: Annotated[
        Literal["auto", "legacy"],
        typer.Option(help="auto finds out which MCP the server speaks; legacy begins with initialize."),
    ] = "auto",
    state: Annotated[
        str | None,
        typer.Option(metavar="<file>", help="Where the next process goes on from, should this one die."),
    ] = None,
    receipts: Annotated[
        str | None,
        typer.Option(metavar="<file>", help="Append what arrives, and how, for gapless audit."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="<seconds>", min=0, help="How long to wait for the result.")
    ] = None,
    header: Headers = None,
) -> None:
    """Call a tool, or list the tools of a server.

    Progress goes to stderr, the result to stdout. The call outlives its connections.

    If the tool fails, its text goes to stderr and the exit status is 1.
    """
    given = _arguments(tool, arguments)
    asked = _Asked(
        url, tool, given, as_json, watch, upgrade, mode, state, receipts, timeout, read_headers(header)
    )
    try:
        asyncio.run(_run(asked))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


def _arguments(tool: str | None, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    example = f"""for example gapless call URL {tool or "TOOL"} '{{"steps": 5}}'"""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the arguments are no JSON: {error}", hint=example) from None
    if not isinstance(found, dict):
        raise UsageError("the arguments are no JSON object", hint=example)
    return cast("dict[str, Any]", found)


async def _run(asked: _Asked) -> None:
    """Connect, ask, leave; print what came of it.

    Raises:
        GaplessError: nothing came of it. Exit: the tool failed, and has said why.
    """
    from mcp import Client

    from gapless.cli.ask import asker
    from gapless.cli.display import Display
    from gapless.client.transport import connect
    from gapless.protocol.client import Retry

    task = asyncio.current_task()
    if asked.state is None and task is not None:  # with a state file the next process goes on instead
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    def observe(seen: Observation) -> None:
        if connection.session is not None and not opening.expired():
            opening.reschedule(None)
        display.observe(seen)

    opening = asyncio.timeout(_OPENING)
    display = Display(asked.tool or "tools", watch=asked.watch)
    # Somebody waits at a terminal: three to five seconds without progress are enough.
    retry = Retry(most=2.0, attempts=6)
    connection = connect(
        asked.url,
        upgrade=asked.upgrade,
        state=asked.state,
        receipts=asked.receipts,
        retry=retry,
        observe=observe,
        headers=asked.headers,
    )
    try:
        async with asyncio.timeout(asked.timeout), opening:
            with display:
                async with Client(connection, mode=asked.mode, elicitation_callback=asker(display)) as client:
                    found = await _ask(client, asked, display)
    except Exception as error:
        if isinstance(connection.error, ConnectionGaveUpError):
            raise ConnectionGaveUpError(f"{asked.url}: {connection.error}") from error
        if connection.error is not None:
            raise connection.error from error
        if opening.expired():
            text = f"no answer from {asked.url} in {_OPENING:g} seconds"
            raise ConnectionGaveUpError(text, hint="is this where the server is?") from error
        raise _told(error, asked) from error
    for answer in connection.recovered:
        say(f"a call of the process before this one was answered: {json.dumps(answer, ensure_ascii=False)}")
    _print(found, asked)


def _told(error: BaseException, asked: _Asked) -> BaseException:
    """An error of the SDK as ours. Its task groups wrap what they raise, one in one."""
    from mcp import MCPError

    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    match error:
        case MCPError():
            return GaplessError(f"the server answered: {error.message}", code="mcp-error")
        case TimeoutError():
            return ConnectionGaveUpError(
                f"no result in {asked.timeout:g} seconds", hint="--timeout allows more"
            )
        case _:
            return error


async def _ask(client: Client, asked: _Asked, display: Display) -> CallToolResult | list[Tool]:
    if asked.tool is not None:
        return await client.call_tool(asked.tool, asked.arguments, progress_callback=display.progress)
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _print(found: CallToolResult | list[Tool], asked: _Asked) -> None:
    if isinstance(found, list):
        _print_tools(found, asked)
        return
    if asked.json:
        print_json(_raw(found))
    for block in [] if asked.json and not found.is_error else found.content:
        text = block.text if block.type == "text" else f"({block.type}; --json shows it)"
        if found.is_error:
            err.print(text, style="red", markup=False, soft_wrap=True)
        else:
            print(text)
    if not found.content and found.structured_content is not None and not asked.json:
        print_json(found.structured_content)
    if found.is_error:
        raise typer.Exit(1)


def _print_tools(tools: list[Tool], asked: _Asked) -> None:
    if asked.json:
        print_json([_raw(tool) for tool in tools])
    elif tools:
        made = table("tool", "description")
        for tool in tools:
            lines = (tool.description or "").strip().splitlines()
            made.add_row(escape(tool.name), escape(lines[0] if lines else ""))
        print_table(made)
    else:
        say("the server has no tools")


def _raw(found: CallToolResult | Tool) -> Any:
    return found.model_dump(mode="json", by_alias=True, exclude_none=True)
