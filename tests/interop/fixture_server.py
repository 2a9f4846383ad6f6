"""The MCP server that the official conformance suite asks for: its tools, prompts and resources.

Nothing here knows of Gapless. Over stdio, over Streamable HTTP with the SDK's own transport, and in
process::

    python tests/interop/fixture_server.py
    python tests/interop/fixture_server.py --http 8000
    gapless serve tests.interop.fixture_server:server
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import sys
import warnings
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import mcp_types as types
from mcp import MCPDeprecationWarning, MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore

__all__ = ["JSON_SCHEMA_2020_12", "TOOLS", "Events", "server"]

Context = ServerRequestContext[Any]
Content = list[types.ContentBlock]
Handler = Callable[[Context, dict[str, Any]], Awaitable[Content]]

PAUSE: Final = 0.05
"""Seconds between two messages of one call, so that a client sees them one by one."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_PNG: Final = base64.b64encode(
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + _chunk(b"IEND", b"")
).decode()
"""One red pixel."""

_WAV: Final = base64.b64encode(
    b"RIFF"
    + struct.pack("<I", 38)
    + b"WAVEfmt "
    + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    + b"data"
    + struct.pack("<Ih", 2, 0)
).decode()
"""One sample of silence."""

JSON_SCHEMA_2020_12: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}

TOOLS: Final[dict[str, types.Tool]] = {}
_HANDLERS: Final[dict[str, Handler]] = {}


def _tool(about: str, *strings: str, schema: dict[str, Any] | None = None) -> Callable[[Handler], Handler]:
    """Register a tool under its function's name; `strings` are its arguments, all of them required."""
    properties = {name: {"type": "string"} for name in strings}
    plain = {"type": "object", "properties": properties, "required": list(strings)}

    def register(handler: Handler) -> Handler:
        name = handler.__name__
        TOOLS[name] = types.Tool(name=name, description=about, input_schema=schema or plain)
        _HANDLERS[name] = handler
        return handler

    return register


def _text(text: str) -> types.TextContent:
    return types.TextContent(text=text)


def _image() -> types.ImageContent:
    return types.ImageContent(data=_PNG, mime_type="image/png")


def _embedded(uri: str, mime_type: str, text: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(
        resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)
    )


# Tools -----------------------------------------------------------------------------------------------


@_tool("Returns a line of text.")
async def test_simple_text(ctx: Context, arguments: dict[str, Any]) -> Content:
    return [_text("This is a simple text response for testing.")]


@_tool("Returns an image.")
async def test_image_content(ctx: Context, arguments: dict[str, Any]) -> Content:
    return [_image()]


@_tool("Returns a sound.")
async def test_audio_content(ctx: Context, arguments: dict[str, Any]) -> Content:
    return [types.AudioContent(data=_WAV, mime_type="audio/wav")]


@_tool("Returns a resource.")
async def test_embedded_resource(ctx: Context, arguments: dict[str, Any]) -> Content:
    return [_embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]


@_tool("Returns text, an image and a resource.")
async def test_multiple_content_types(ctx: Context, arguments: dict[str, Any]) -> Content:
    data = json.dumps({"test": "data", "value": 123}, separators=(",", ":"))
    mixed = _embedded("test://mixed-content-resource", "application/json", data)
    return [_text("Multiple content types test:"), _image(), mixed]


@_tool("Logs three times.")
async def test_tool_with_logging(ctx: Context, arguments: dict[str, Any]) -> Content:
    await _log(ctx, "Tool execution started")
    await asyncio.sleep(PAUSE)
    await _log(ctx, "Tool processing data")
    await asyncio.sleep(PAUSE)
    await _log(ctx, "Tool execution completed")
    return [_text("Logged three times.")]


async def _log(ctx: Context, data: str) -> None:
    params = types.LoggingMessageNotificationParams(level="info", data=data)
    await ctx.session.send_notification(types.LoggingMessageNotification(params=params), ctx.request_id)


@_tool("Reports progress three times.")
async def test_tool_with_progress(ctx: Context, arguments: dict[str, Any]) -> Content:
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100, f"{done} of 100")
        await asyncio.sleep(PAUSE)
    return [_text("Reported progress three times.")]


@_tool("Fails.")
async def test_error_handling(ctx: Context, arguments: dict[str, Any]) -> Content:
    raise RuntimeError("This tool intentionally returns an error for testing")


@_tool("Has the client ask its model.", "prompt")
async def test_sampling(ctx: Context, arguments: dict[str, Any]) -> Content:
    asked = types.SamplingMessage(role="user", content=_text(arguments["prompt"]))
    answer = await ctx.session.create_message([asked], max_tokens=100, related_request_id=ctx.request_id)
    return [_text(f"LLM response: {getattr(answer.content, 'text', answer.content)}")]


@_tool("Asks the user who they are.", "message")
async def test_elicitation(ctx: Context, arguments: dict[str, Any]) -> Content:
    properties = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    }
    answer = await _ask(ctx, arguments["message"], properties, required=["username", "email"])
    return [_text(f"User response: {answer}")]


@_tool("Asks the user, with a default for everything.")
async def test_elicitation_sep1034_defaults(ctx: Context, arguments: dict[str, Any]) -> Content:
    properties = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    return [_text(f"Elicitation completed: {await _ask(ctx, 'Are these right?', properties)}")]


@_tool("Asks the user to choose, in every way there is.")
async def test_elicitation_sep1330_enums(ctx: Context, arguments: dict[str, Any]) -> Content:
    def titled(*titles: str) -> list[dict[str, str]]:
        return [{"const": f"value{n}", "title": title} for n, title in enumerate(titles, 1)]

    options = ["option1", "option2", "option3"]
    single = titled("First Option", "Second Option", "Third Option")
    several = titled("First Choice", "Second Choice", "Third Choice")
    names = ["Option One", "Option Two", "Option Three"]
    properties = {
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": single},
        "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": names},
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": several}},
    }
    return [_text(f"Elicitation completed: {await _ask(ctx, 'Choose.', properties)}")]


async def _ask(ctx: Context, message: str, properties: dict[str, Any], required: list[str] = []) -> str:  # noqa: B006
    schema = {"type": "object", "properties": properties, "required": required}
    answer = await ctx.session.elicit_form(message, schema, ctx.request_id)
    return f"action={answer.action}, content={json.dumps(answer.content or {})}"


@_tool("Closes its stream, where its transport has one to close, and answers afterwards.")
async def test_reconnection(ctx: Context, arguments: dict[str, Any]) -> Content:
    await asyncio.sleep(PAUSE)
    if ctx.close_sse_stream is not None:
        await ctx.close_sse_stream()
    await asyncio.sleep(2 * PAUSE)
    return [_text("Reconnection test completed successfully")]


@_tool("Tool with JSON Schema 2020-12 features", schema=JSON_SCHEMA_2020_12)
async def json_schema_2020_12_tool(ctx: Context, arguments: dict[str, Any]) -> Content:
    return [_text(json.dumps(arguments))]


async def _list_tools(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=list(TOOLS.values()))


async def _call_tool(ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
    handler = _HANDLERS.get(params.name)
    if handler is None:
        raise MCPError(types.INVALID_PARAMS, f"no tool {params.name}")
    try:
        return types.CallToolResult(content=await handler(ctx, params.arguments or {}))
    except Exception as error:
        return types.CallToolResult(content=[_text(str(error))], is_error=True)


# Resources -------------------------------------------------------------------------------------------

_RESOURCES: Final = [
    types.Resource(
        uri="test://static-text", name="static text", description="A line.", mime_type="text/plain"
    ),
    types.Resource(
        uri="test://static-binary", name="static binary", description="A pixel.", mime_type="image/png"
    ),
    types.Resource(
        uri="test://watched-resource", name="watched", description="To subscribe to.", mime_type="text/plain"
    ),
]
_TEMPLATE: Final = types.ResourceTemplate(
    uri_template="test://template/{id}/data",
    name="template",
    description="Data for an ID.",
    mime_type="application/json",
)


async def _list_resources(
    ctx: Context, params: types.PaginatedRequestParams | None
) -> types.ListResourcesResult:
    return types.ListResourcesResult(resources=_RESOURCES)


async def _list_templates(
    ctx: Context, params: types.PaginatedRequestParams | None
) -> types.ListResourceTemplatesResult:
    return types.ListResourceTemplatesResult(resource_templates=[_TEMPLATE])


async def _read(ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[_contents(str(params.uri))])


def _contents(uri: str) -> types.TextResourceContents | types.BlobResourceContents:
    if uri == "test://static-binary":
        return types.BlobResourceContents(uri=uri, mime_type="image/png", blob=_PNG)
    mime_type = "text/plain"
    if uri == "test://static-text":
        text = "This is the content of the static text resource."
    elif uri == "test://watched-resource":
        text = "Nothing has changed yet."
    elif found := re.fullmatch(r"test://template/([^/]+)/data", uri):
        mime_type = "application/json"
        text = json.dumps({"id": found[1], "templateTest": True, "data": f"Data for ID: {found[1]}"})
    else:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": uri})
    return types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)


async def _subscribe(
    ctx: Context, params: types.SubscribeRequestParams | types.UnsubscribeRequestParams
) -> types.EmptyResult:
    return types.EmptyResult()


# Prompts ---------------------------------------------------------------------------------------------


def _prompt(name: str, about: str, *arguments: str) -> types.Prompt:
    return types.Prompt(
        name=name,
        description=about,
        arguments=[types.PromptArgument(name=argument, required=True) for argument in arguments],
    )


_PROMPTS: Final = [
    _prompt("test_simple_prompt", "A line."),
    _prompt("test_prompt_with_arguments", "A line with two arguments in it.", "arg1", "arg2"),
    _prompt("test_prompt_with_embedded_resource", "A resource and a line.", "resourceUri"),
    _prompt("test_prompt_with_image", "An image and a line."),
]


async def _list_prompts(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
    return types.ListPromptsResult(prompts=_PROMPTS)


async def _get_prompt(ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    given = params.arguments or {}
    match params.name:
        case "test_simple_prompt":
            said: Content = [_text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            said = [_text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            text = "Embedded resource content for testing."
            resource = _embedded(given["resourceUri"], "text/plain", text)
            said = [resource, _text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            said = [_image(), _text("Please analyze the image above.")]
        case name:
            raise MCPError(types.INVALID_PARAMS, f"no prompt {name}")
    return types.GetPromptResult(
        messages=[types.PromptMessage(role="user", content=content) for content in said]
    )


async def _complete(ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
    values = [word for word in ("paris", "park", "party") if word.startswith(params.argument.value)]
    return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


async def _set_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    return types.EmptyResult()


with warnings.catch_warnings():
    # The suite asks for logging, which is deprecated.
    warnings.simplefilter("ignore", MCPDeprecationWarning)
    server = Server(
        "conformance-fixture",
        version="1.0.0",
        on_list_tools=_list_tools,
        on_call_tool=_call_tool,
        on_list_resources=_list_resources,
        on_list_resource_templates=_list_templates,
        on_read_resource=_read,
        on_subscribe_resource=_subscribe,
        on_unsubscribe_resource=_subscribe,
        on_list_prompts=_list_prompts,
        on_get_prompt=_get_prompt,
        on_completion=_complete,
        on_set_logging_level=_set_level,
    )


# Alone -----------------------------------------------------------------------------------------------


class Events(EventStore):
    """Keeps all events for as long as it lives, numbered from 1: the SDK resumes only with a store."""

    def __init__(self) -> None:
        self._events: list[tuple[str, types.JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: types.JSONRPCMessage | None) -> str:
        self._events.append((stream_id, message))
        return str(len(self._events))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        last = int(last_event_id)
        if not 0 < last <= len(self._events):
            return None
        stream = self._events[last - 1][0]
        for number, (of, message) in enumerate(self._events[last:], last + 1):
            if of == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


async def _stdio() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def main(arguments: list[str]) -> None:
    """Serve over stdio, or with `--http PORT` at /mcp of that port of 127.0.0.1."""
    if arguments[:1] == ["--http"]:
        import uvicorn

        app = server.streamable_http_app(event_store=Events(), retry_interval=100)
        uvicorn.run(app, host="127.0.0.1", port=int(arguments[1]), log_level="warning")
    else:
        asyncio.run(_stdio())


if __name__ == "__main__":
    main(sys.argv[1:])
