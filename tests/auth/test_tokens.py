"""Tokens in a file: whom they stand for, and what becomes of those that go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gapless.auth.base import DeniedError
from gapless.auth.tokens import TokenFile, new_token
from gapless.errors import UsageError


def write(path: Path, *lines: str) -> None:
    """The file anew, as an editor leaves it: another file of that name."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines))
    os.replace(fresh, path)


async def test_a_token_stands_for_the_name_on_its_line(tmp_path: Path) -> None:
    (first, a), (second, b), (third, c) = new_token("ann"), new_token("bob"), new_token("ann")
    write(tmp_path / "tokens", "# who may", a, "", b, c)
    tokens = TokenFile(tmp_path / "tokens")
    assert [(await tokens.verify(token)).name for token in (first, second, third)] == ["ann", "bob", "ann"]
    for other in ("", first[:-1], f"{first}x", a, a.partition(":")[2]):
        with pytest.raises(DeniedError):
            await tokens.verify(other)


def test_the_file_holds_no_token(tmp_path: Path) -> None:
    token, line = new_token("ann")
    assert token not in line
    assert len(token) >= 43, "256 bits"


async def test_whose_lines_are_gone_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    (first, a), (_, b) = new_token("ann"), new_token("bob")
    write(path, a, b)
    tokens = TokenFile(path)
    assert tokens.look() == frozenset()
    write(path, b)
    assert tokens.look() == {"ann"}
    with pytest.raises(DeniedError):
        await tokens.verify(first)


async def test_a_file_that_cannot_be_read_meanwhile_changes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever deleted a line, and left another damaged, has to hear that nobody was revoked."""
    path = tmp_path / "tokens"
    token, line = new_token("ann")
    write(path, line)
    tokens = TokenFile(path)
    write(path, "nonsense")
    for _ in range(3):
        assert tokens.look() == frozenset()
    path.unlink()
    for _ in range(3):
        assert tokens.look() == frozenset()
    assert (await tokens.verify(token)).name == "ann"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "nobody is revoked" in told[0]
    assert "line 1" in told[0]
    assert "No such file" in told[1]
    write(path, new_token("bob")[1])
    assert tokens.look() == {"ann"}


@pytest.mark.parametrize("line", ["ann", "ann:abc", f"a b:{'0' * 64}", f":{'0' * 64}", f"ann:{'0' * 65}"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    write(path, new_token("bob")[1], line)
    with pytest.raises(UsageError, match="line 2"):
        TokenFile(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        TokenFile(tmp_path / "none")


@pytest.mark.parametrize("name", ["", "a b", "a:b", "#a"])
def test_a_name_that_cannot_stand_in_a_line_gets_no_token(name: str) -> None:
    with pytest.raises(UsageError, match="is no name"):
        new_token(name)
