"""An option for each limit and timer (§8). Defaults and types are those of `Limits`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Final

import typer

from gapless.cli.output import size, span
from gapless.protocol.settings import Limits

__all__ = ["some_limits", "with_limits"]

_SERVED: Final = {
    "max_message_bytes": "The largest message, either way.",
    "retain_events": "How many events are kept of a session.",
    "retain_bytes": "How many bytes of events are kept of a session.",
    "retain_seconds": "How long an event is kept.",
    "ack_window": "How long a new WebSocket may go without acknowledging what it missed.",
    "upgrade_window": "How long the events that an upgrade carries across are kept whatever the limits say.",
    "probe_timeout": "How long a WebSocket may be silent when somebody else asks for its session.",
    "keepalive": "How often a silent connection carries a sign of life.",
    "session_expiry": "How long a session lives without a connection.",
    "tombstone": "How long it is told why a session ended.",
    "lease": "How long this process may show no life before another one on the log takes its sessions.",
}
_TAKEN: Final = {
    "max_inbox": "How many messages of a session may wait for its MCP server.",
    "max_requests": "How many requests of a session may be in flight.",
    "max_subscriptions": "How many resources a session may be subscribed to.",
    "max_session_connections": "How many event streams and WebSockets a session may have.",
    "max_upgrades_per_minute": "How often a session may try to move to a WebSocket.",
    "max_sessions": "How many sessions there may be.",
    "max_principal_sessions": "How many of them one principal may have; anonymous has them all.",
    "max_children": "How many stdio servers may run, one for each session.",
    "max_connections": "How many TCP connections there may be; as many as three quarters of the descriptors.",
    "max_header_bytes": "The largest request line and headers.",
    "max_url_bytes": "The longest URL.",
    "header_timeout": "How long a connection may take to send a request's headers.",
    "body_timeout": "How long a body may take; each KiB that comes earns a second of that back.",
}
_HELP: Final = _SERVED | _TAKEN
_UNITS: Final = {"max_inbox": "messages", "max_upgrades_per_minute": "attempts"}


def with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes `limits`, an option for each of them instead."""
    return some_limits(*_HELP)(command)


def some_limits(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes `limits`, an option for each of those named instead."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = [_option(field.name, field.default) for field in fields(Limits) if field.name in names]

        @wraps(command)
        def wrapper(**given: Any) -> None:
            limits = Limits(**{name: given.pop(name) for name in names})
            command(**given, limits=limits)

        signature = inspect.signature(command, eval_str=True)
        kept = [parameter for parameter in signature.parameters.values() if parameter.name != "limits"]
        wrapper.__dict__["__signature__"] = signature.replace(parameters=[*kept, *options])
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *options]}
        return wrapper

    return decorate


def _option(name: str, default: Any) -> inspect.Parameter:
    if isinstance(default, float):
        unit, also = "seconds", f" = {span(default)}" if default >= 120 else ""
    elif name.endswith("bytes"):
        unit, also = "bytes", f" = {size(default)}"
    else:
        unit, also = _UNITS.get(name, name.rpartition("_")[2]), ""
    option = typer.Option(
        help=f"{_HELP[name]} [dim]\\[default: {default:.10g}{also}][/dim]",
        metavar=f"<{unit}>",
        show_default=False,
        callback=_positive,
        rich_help_panel="What is taken on" if name in _TAKEN else "Limits and timers",
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type(default), option]
    )


def _positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value
