"""Options from a TOML file and from the environment, for those that the command line leaves out."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

import typer
from typer.models import OptionInfo

from gapless.errors import UsageError

__all__ = ["ENVIRONMENT", "Config", "configured"]

ENVIRONMENT: Final[dict[str, str]] = {"auto_envvar_prefix": "GAPLESS_SERVE"}
"""Settings of a command that takes options from the environment: `--port` from `GAPLESS_SERVE_PORT`.

Not `GAPLESS_PORT`: that is what Kubernetes sets where a service is called gapless.
"""


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Name no variable beside each option of `command` in its help: `--config` tells of all of them."""
    for parameter in inspect.signature(command).parameters.values():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                option.show_envvar = False
    return command


def _read(context: typer.Context, path: str | None) -> str | None:
    """Take what the file says for defaults; click checks values as it does those of options."""
    if path is None:
        return None
    command = context.info_name or ""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise UsageError(
            f"--config {path}: {error.strerror}", hint="name a TOML file that is there"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is no TOML: {error}", hint='for example: port = 9000, under "[serve]"'
        ) from None
    table: Any = found.get(command, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {command} is no table", hint=f"write [{command}] above the options")
    given = {name.replace("-", "_"): value for name, value in cast("dict[str, Any]", table).items()}
    known = {parameter.name for parameter in context.command.params} - {"config", "help"}
    unknown = sorted(given.keys() - known)
    if unknown:
        told = f"{path}: [{command}] has no {', '.join(unknown)}"
        raise UsageError(told, hint=f"its names are those of the options of gapless {command}")
    context.default_map = given
    return path


Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        is_eager=True,
        callback=_read,
        help="A TOML file with these options, in its table serve. The command line comes first, then "
        "variables such as GAPLESS_SERVE_PORT, then the file.",
    ),
]
