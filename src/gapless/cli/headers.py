"""`--header`: what every request to a server carries, secrets taken from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from string import Template
from typing import Annotated, Final

import typer

from gapless.errors import UsageError

__all__ = ["Headers", "read_headers"]

Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="<name: value>",
        show_default=False,
        help="Sent with every request; repeat it for several. ${NAME} is taken from the environment, "
        "where other users of this machine cannot see it; $$ is a dollar sign.",
    ),
]
"""The option; its value is for `read_headers`."""

_EXAMPLE: Final = "'Authorization: Bearer ${TOKEN}'"
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_VALUE: Final = re.compile(r"[\t\x20-\x7e]*", re.ASCII)


def read_headers(given: Iterable[str] | None, option: str = "--header") -> dict[str, str]:
    """The headers that `option` was given, by name, each variable replaced by what it stands for.

    Raises:
        UsageError: one is no header, or names a variable that is not set. No value is told.
    """
    headers: dict[str, str] = {}
    for text in given or ():
        name, colon, value = text.partition(":")
        name = name.strip()
        if not colon or not _NAME.fullmatch(name):
            hint = f"for example {option} {_EXAMPLE}"
            raise UsageError(f"{option} is given what is not of the form 'name: value'", hint=hint)
        try:
            value = Template(value.strip()).substitute(os.environ)
        except KeyError as missing:
            variable = missing.args[0]
            told = f"{option} {name} takes ${{{variable}}} from the environment, and it is not set"
            raise UsageError(told, hint=f"set {variable}") from None
        except ValueError:
            told = f"{option} {name} has a $ that begins no name"
            raise UsageError(told, hint="write ${NAME}, or $$ for a dollar sign") from None
        if not _VALUE.fullmatch(value):
            raise UsageError(f"{option} {name} holds a character that no header may", hint="ASCII only")
        headers[name] = value
    return headers
