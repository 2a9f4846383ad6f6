"""How the server is reached: what holds for requests holds for the socket."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from websockets.exceptions import ConnectionClosedError

from gapless.client.network import open_network
from gapless.client.websocket import Socket

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("options", "proxy"),
    [
        ({}, None),
        ({"trust_env": False}, False),
        ({"proxy": "http://p:1"}, "http://p:1"),
        ({"proxy": "http://p:1", "trust_env": False}, "http://p:1"),
    ],
)
async def test_a_socket_goes_by_the_environment_only_where_requests_do(
    options: dict[str, Any], proxy: str | bool | None
) -> None:
    """`None` is as the environment says, `False` is none."""
    network = open_network("http://127.0.0.1:1/mcp", options)
    assert network.proxy == proxy
    await network.client.aclose()


class Peer:
    """A connection that takes everything until it is aborted."""

    def __init__(self) -> None:
        self.transport = self
        self.gone = False
        self.sent: list[str] = []

    def abort(self) -> None:
        self.gone = True

    async def send(self, frame: str) -> None:
        if self.gone:
            raise ConnectionClosedError(None, None)
        self.sent.append(frame)


@pytest.mark.parametrize("behind", [0, 2])
async def test_who_writes_to_a_socket_ends_with_it(behind: int) -> None:
    peer = Peer()
    socket = Socket(cast("Any", peer))
    writing = asyncio.create_task(socket.write())
    socket.send(b"one")
    await asyncio.sleep(0)
    for _ in range(behind):
        socket.send(b"late")
    socket.abort()
    await writing
    assert peer.sent == ["one"]
