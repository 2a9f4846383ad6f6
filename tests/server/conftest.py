"""Fixtures of the server's tests: how to start one, and one that is started."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from tests.server.harness import Serve, Server


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(*numbers): the rules of the protocol that a test shows")


_LISTENED_TO = ("uvicorn.error", "hypercorn.error", "asyncio")


@pytest.fixture
async def serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Starts servers, with a log and limits as given. What they log as an error fails the test."""
    # How long a refused handshake's task lingers: a test would only wait for that.
    monkeypatch.setattr("gapless.server.wire._LINGER", 0.02)
    serve = Serve(getattr(request, "param", "uvicorn"))
    loggers = [logging.getLogger(name) for name in _LISTENED_TO]
    for logger in loggers:
        logger.addHandler(serve.complaints)
    try:
        yield serve
        await serve.close()
    finally:
        for logger in loggers:
            logger.removeHandler(serve.complaints)
    assert serve.complaints.seen == []


@pytest.fixture
async def server(serve: Serve) -> Server:
    """A server with the default limits and a log in memory."""
    return await serve()
