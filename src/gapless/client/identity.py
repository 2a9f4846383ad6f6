"""Keeping IDs apart across client processes (N3): marked on the way out, unmarked on the way in.

Request IDs and progress tokens start at 1 in every process of the official SDK. A process that
goes on with another's session marks its own, so that an answer to a dead process's request is
never taken for one of its own. The first process of a session rewrites nothing.
"""

from __future__ import annotations

from typing import Any, Final, cast

from gapless.protocol.marks import Mark

__all__ = ["Identity"]

_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"


class Identity:
    """The marks of one client process: its number among those that have used the session."""

    def __init__(self, incarnation: int) -> None:
        self._mark = Mark(f"p{incarnation}." if incarnation else "")

    def __bool__(self) -> bool:
        return bool(self._mark)

    def mark(self, id: Any) -> Any:
        """An ID of a request of this process, as it goes over the wire."""
        return self._mark.put_on(id)

    def owns(self, id: Any) -> bool:
        """Whether an answer under this wire ID is for this process."""
        return self._mark.bears(id)

    def outgoing(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of the application, as it goes over the wire. The message is changed in place."""
        if not self._mark:
            return message
        if "method" in message and "id" in message:
            message["id"] = self._mark.put_on(message["id"])
        params = _object(message.get("params"))
        meta = _object(params.get("_meta"))
        if "progressToken" in meta:
            meta["progressToken"] = self._mark.put_on(meta["progressToken"])
        if message.get("method") == "notifications/cancelled" and "requestId" in params:
            params["requestId"] = self._mark.put_on(params["requestId"])
        return message

    def incoming(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message off the wire, as the application knows its IDs. The message is changed in place."""
        if not self._mark:
            return message
        if "method" not in message and "id" in message:
            message["id"] = self._mark.take_off(message["id"])
            meta = _object(_object(message.get("result")).get("_meta"))
        else:
            params = _object(message.get("params"))
            if message.get("method") == "notifications/progress" and "progressToken" in params:
                params["progressToken"] = self._mark.take_off(params["progressToken"])
            meta = _object(params.get("_meta"))
        if _SUBSCRIPTION in meta:
            meta[_SUBSCRIPTION] = self._mark.take_off(meta[_SUBSCRIPTION])
        return message


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
