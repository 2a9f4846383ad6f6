"""The suite's fixture behind Gapless, by the official SDK's client: what `make interop` begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp_types import CreateMessageResult, ElicitResult, TextContent

import gapless
from tests.interop.fixture_server import JSON_SCHEMA_2020_12, TOOLS, server
from tests.real.serving import served

ERAS = ["legacy", "auto"]

pytestmark = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")


def text(result: Any) -> str:
    return result.content[0].text


@pytest.mark.parametrize("mode", ERAS)
async def test_all_tools_are_listed_and_their_schemas_arrive_whole(mode: str) -> None:
    async with served(backend=server) as (url, _), Client(gapless.connect(url), mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == TOOLS.keys()
        assert tools["json_schema_2020_12_tool"].input_schema == JSON_SCHEMA_2020_12


@pytest.mark.parametrize("mode", ERAS)
async def test_every_kind_of_content_arrives(mode: str) -> None:
    async with served(backend=server) as (url, _), Client(gapless.connect(url), mode=mode) as client:
        kinds = {
            name: [block.type for block in (await client.call_tool(name, {})).content]
            for name in ("test_image_content", "test_audio_content", "test_multiple_content_types")
        }
        assert kinds == {
            "test_image_content": ["image"],
            "test_audio_content": ["audio"],
            "test_multiple_content_types": ["text", "image", "resource"],
        }
        failed = await client.call_tool("test_error_handling", {})
        assert failed.is_error
        assert text(failed) == "This tool intentionally returns an error for testing"


@pytest.mark.parametrize("mode", ERAS)
async def test_resources_and_prompts_are_served(mode: str) -> None:
    async with served(backend=server) as (url, _), Client(gapless.connect(url), mode=mode) as client:
        (contents,) = (await client.read_resource("test://template/7/data")).contents
        assert json.loads(getattr(contents, "text", ""))["id"] == "7"
        with pytest.raises(MCPError, match="Resource not found"):
            await client.read_resource("test://nowhere")
        prompt = await client.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
        assert getattr(prompt.messages[0].content, "text", "") == "Prompt with arguments: arg1='a', arg2='b'"


@pytest.mark.parametrize("mode", ERAS)
async def test_progress_is_reported_in_order(mode: str) -> None:
    reported: list[float] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    async with served(backend=server) as (url, _), Client(gapless.connect(url), mode=mode) as client:
        await client.call_tool("test_tool_with_progress", {}, progress_callback=note)
    assert reported == [0, 50, 100]


async def test_the_model_and_the_user_are_asked_in_the_initialize_era() -> None:
    async def sample(context: Any, params: Any) -> CreateMessageResult:
        return CreateMessageResult(role="assistant", content=TextContent(text="42"), model="none")

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"username": "u", "email": "e"})

    async with served(backend=server) as (url, _):
        connection = gapless.connect(url)
        async with Client(
            connection, mode="legacy", sampling_callback=sample, elicitation_callback=answer
        ) as client:
            assert text(await client.call_tool("test_sampling", {"prompt": "?"})) == "LLM response: 42"
            asked = await client.call_tool("test_elicitation", {"message": "Who?"})
            assert text(asked).startswith("User response: action=accept")
