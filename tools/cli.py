"""Writes docs/reference/cli.md from the commands' own help.

::

    python tools/cli.py            # write the page anew
    python tools/cli.py --check    # exit 1 if the page is not what the commands say
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import typer
from rich.text import Text

from gapless.cli import app

__all__ = ["PAGE", "main", "written"]

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

_HEAD: Final = """\
<!-- Written by tools/cli.py from the commands' help. Do not edit. -->

# The command line

Results go to stdout, everything else to stderr. The exit status is 0 for success, 1 for a
failure and 2 for misuse. A failure is told in one line; `gapless --debug COMMAND` shows where it
comes from.
"""
_DEFAULT: Final = re.compile(r" ?\[default: (.*)\]$")


def written() -> str:
    """The page."""
    text = "\n".join([_HEAD, *_command(typer.main.get_command(app), "gapless", top=True)])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _command(command: Any, name: str, *, top: bool = False) -> Iterator[str]:
    commands: dict[str, Any] = getattr(command, "commands", {})
    if not top:
        yield f"## {name}\n"
        yield f"{inspect.cleandoc(_plain(command.help))}\n"
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    if commands:
        yield f"```\n{name} [OPTIONS] COMMAND [ARGS]...\n```\n"
    else:
        words = [f"{a.metavar}" if a.required else f"[{a.metavar}]" for a in arguments]
        yield f"```\n{' '.join([name, *(['[OPTIONS]'] if options else []), *words])}\n```\n"
    if arguments:
        yield "| argument | what it is |\n|---|---|"
        yield from (f"| `{_cell(a.metavar)}` | {_cell(_plain(a.help))} |" for a in arguments)
        yield ""
    panels = dict.fromkeys(getattr(option, "rich_help_panel", None) for option in options)
    for panel in panels:
        yield f"{panel}:\n" if panel else ""
        yield "| option | default | what it does |\n|---|---|---|"
        yield from (_option(o) for o in options if getattr(o, "rich_help_panel", None) == panel)
        yield ""
    if command.epilog:
        examples = _plain(command.epilog).removeprefix("Examples\n")
        yield f"```sh\n{re.sub(r'(?m)^[$] ', '', examples)}\n```\n"
    for inner, found in commands.items():
        yield from _command(found, f"{name} {inner}")


def _option(option: Any) -> str:
    text, default = _plain(option.help), ""
    told = _DEFAULT.search(text)
    if told is not None:
        text, default = text[: told.start()], told[1]
    elif option.default is not None and not option.is_flag:
        default = f"`{option.default}`"
    value = "" if option.is_flag else " " + (option.metavar or _metavar(option.type_descriptor.annotation))
    names = ", ".join(option.opts)
    return f"| `{_cell(names + value)}` | {_cell(default)} | {_cell(text)} |"


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    inner = get_args(annotation)[0] if get_args(annotation) else annotation
    return {int: "<number>", float: "<number>"}.get(inner, "<text>")


def _plain(text: str | None) -> str:
    return Text.from_markup(text or "").plain.strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("* ", "\\* ").replace("\n", " ")


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it; the exit status is returned."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is out of date")
    options = parser.parse_args(arguments)
    new = written()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    if options.check:
        print(f"{PAGE.name} is out of date: run python tools/cli.py")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.name} is written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
