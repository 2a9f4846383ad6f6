"""Draws the state diagrams of the docs from the tables that the code runs on.

::

    python tools/diagrams.py            # write them into the page anew
    python tools/diagrams.py --check    # exit 1 if the page is not what the tables say

They stand between `<!-- generated: NAME -->` and `<!-- end -->`, as Mermaid.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gapless.protocol.client import ALLOWED, Phase
from gapless.protocol.door import TRANSITIONS
from gapless.protocol.seam import SessionState

__all__ = ["BLOCKS", "PAGE", "door", "drawn", "main", "phases"]

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "architecture.md"
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def door() -> str:
    """The server's door: what changes the state as a diagram, everything as a table."""
    arrows: dict[tuple[SessionState, SessionState], list[str]] = {}
    rows: list[str] = []
    for (state, asked), (do, after) in TRANSITIONS.items():
        if state is not after:
            arrows.setdefault((state, after), []).append(f"{asked.value} / {do.value}")
        rows.append(f"| `{state.name}` | {asked.value} | {do.value} | `{after.name}` |")
    lines = [f"    [*] --> {SessionState.SSE_ACTIVE.name}"]
    for (state, after), labels in arrows.items():
        lines.append(f"    {state.name} --> {after.name}: {'<br/>'.join(labels)}")
    lines.append(f"    {SessionState.TERMINATED.name} --> [*]")
    table = ["| in | asked | what is done | then |", "|---|---|---|---|", *rows]
    return "\n".join([*_mermaid(lines), "", "Every legal pair:", "", *table])


def phases() -> str:
    """The client's phases. What leads to the end from everywhere is said, not drawn."""
    ending = {phase for phase, after in ALLOWED.items() if Phase.OVER in after}
    always = ending == set(Phase) - {Phase.OVER}
    lines = [f"    [*] --> {Phase.NEW.value}"]
    for phase, after in ALLOWED.items():
        # In the order of the enum: sets have none.
        lines += [
            f"    {phase.value} --> {to.value}"
            for to in Phase
            if to in after and not (always and to is Phase.OVER)
        ]
    lines.append(f"    {Phase.OVER.value} --> [*]")
    note = f"Every phase may also lead to `{Phase.OVER.value}`." if always else ""
    return "\n".join([*_mermaid(lines), "", note]).rstrip()


def _mermaid(lines: list[str]) -> list[str]:
    return ["```mermaid", "stateDiagram-v2", *lines, "```"]


BLOCKS: Final[dict[str, Callable[[], str]]] = {"door": door, "client": phases}


def drawn(page: str) -> str:
    """The page with its diagrams drawn anew.

    Raises:
        ValueError: a diagram has no place in it, or a place no diagram.
    """
    places = [name for _, name, _ in _BLOCK.findall(page)]
    if sorted(places) != sorted(BLOCKS):
        raise ValueError(f"the page has places for {places}, and there is {sorted(BLOCKS)} to draw")
    return _BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", page)


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it; the exit status is returned."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is out of date")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    new = drawn(page)
    if new == page:
        return 0
    if options.check:
        print(f"{PAGE.name} is out of date: run python tools/diagrams.py")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.name} is drawn anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
