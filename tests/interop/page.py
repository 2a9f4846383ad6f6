"""The tables of docs/reference/interop.md, between their marks; what is around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["PAGE", "Section", "rewritten"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "interop.md"


@dataclass(frozen=True, slots=True)
class Section:
    """A table, and the name in its marks."""

    name: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])

    def __str__(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def rewritten(page: str, sections: Iterable[Section]) -> str:
    """The page with these tables in place of those it had.

    Raises:
        ValueError: a section has no marks on the page, or several.
    """
    for section in sections:
        begin, end = f"<!-- make interop: {section.name} -->\n", "<!-- end -->"
        table = f"{begin}\n{section}\n{end}"
        page, times = re.subn(
            f"{re.escape(begin)}.*?{end}", lambda _, table=table: table, page, flags=re.DOTALL
        )
        if times != 1:
            raise ValueError(f"{PAGE.name} has {times} places for {section.name}")
    return page
