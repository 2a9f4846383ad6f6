"""The lives that a soak is made of, where something happens to them that an hour has once or never."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gapless.cli.target import serving
from gapless.torture.reading import Answer
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Target
from tests.soak.lives import OPTIONS, World


async def test_a_resident_goes_on_after_a_call_that_is_cut_before_anything_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--log", f"sqlite:///{tmp_path / 'soak.db'}", *OPTIONS, "examples.ladder_server:server")
    begin = StandardSession._begin  # pyright: ignore[reportPrivateUsage]

    @asynccontextmanager
    async def cut(session: StandardSession, call: dict[str, Any]) -> AsyncGenerator[Answer]:
        world.over = call["id"] == 4
        if call["id"] == 2:
            raise httpx2.ReadError("cut")
        async with begin(session, call) as answer:
            yield answer

    monkeypatch.setattr(StandardSession, "_begin", cut)
    async with serving(words, LADDER_JOURNAL=str(tmp_path / "journal")) as (url, pid), asyncio.timeout(30):
        world = World(Target(url, pid), random.Random(1))
        await world.live("standard resident")
    assert not world.findings
    assert (world.counts["calls of residents"], world.counts["unresumable"]) == (4, 1)
