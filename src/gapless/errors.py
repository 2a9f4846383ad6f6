"""Every error Gapless raises, in one tree.

::

    GaplessError                        code, hint
    ├── MalformedError                  malformed        bytes that are not what the protocol says
    ├── TooLargeError                   too-large        a block or message above the limit
    ├── SessionMigrationGapError        migration-gap    a migration would skip events
    ├── CursorDiscontinuityError        cursor-discontinuity   an event does not follow the cursor
    ├── NonResumableUpgradeBoundaryError  non-resumable-boundary  resumed at a one-way door
    ├── SessionEndedError               (its reason)     the session ended; open a new one
    ├── ConnectionGaveUpError           gave-up          retries exhausted without progress
    ├── RefusedError                    (its reason)     the server refused, and says why
    ├── LogError
    │   ├── StorageError                storage          the log could not be read or written; retry
    │   ├── ConflictError               log-conflict     somebody else wrote; re-read
    │   └── SchemaError                 log-schema       a log of another version
    ├── BackendError                    backend-lost     the MCP server behind a session failed
    └── UsageError                      usage            a local call or setting that cannot be
        └── TargetError                 target           a server that cannot be judged

`code` is stable and machine-readable; `hint` says what to do next, in one line.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ConflictError",
    "ConnectionGaveUpError",
    "CursorDiscontinuityError",
    "GaplessError",
    "LogError",
    "MalformedError",
    "NonResumableUpgradeBoundaryError",
    "RefusedError",
    "SchemaError",
    "SessionEndedError",
    "SessionMigrationGapError",
    "StorageError",
    "TargetError",
    "TooLargeError",
    "UsageError",
]


class GaplessError(RuntimeError):
    """The root: `code` names the kind for machines, `hint` the next step for people."""

    code: str = "gapless"
    hint: str = ""

    def __init__(self, message: str = "", *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if hint is not None:
            self.hint = hint

    @property
    def line(self) -> str:
        """The error and its hint as the one line that the command line prints."""
        text = " ".join(str(self).split()) or self.code
        return f"{text} ({self.hint})" if self.hint else text


class MalformedError(GaplessError):
    """Bytes that are not what the protocol says; costs only their sender."""

    code = "malformed"


class TooLargeError(GaplessError):
    """A block, frame or message above the advertised limit (W5)."""

    code = "too-large"


class SessionMigrationGapError(GaplessError):
    """Raised when a WebSocket migration would skip unreplayed events (U1, U3)."""

    code = "migration-gap"
    hint = "resume the event stream from your own cursor"


class CursorDiscontinuityError(GaplessError):
    """Raised when what arrived does not follow the cursor, or an upgrade cannot preserve it (C7, U2)."""

    code = "cursor-discontinuity"
    hint = "resume the event stream from the last good cursor"


class NonResumableUpgradeBoundaryError(GaplessError):
    """Raised when a resume is requested while an upgrade is durable and its handshake pending (B1)."""

    code = "non-resumable-boundary"
    hint = "open a new session"


class SessionEndedError(GaplessError):
    """The session ended for the reason in `code`; requests left open are `outcome-unknown` (L7)."""

    code = "session-ended"
    hint = "open a new session"


class ConnectionGaveUpError(GaplessError):
    """The client stopped retrying: no progress within its budget (§8)."""

    code = "gave-up"
    hint = "check that the server is reachable, then connect again"


class RefusedError(GaplessError):
    """The server refused a request; `code` is its reason (§8)."""


class LogError(GaplessError):
    """A durable log failed."""

    code = "log"


class StorageError(LogError):
    """The log could not be read or written now; nothing was acknowledged (L2)."""

    code = "storage"
    hint = "free space or repair the log's volume; clients retry by themselves"


class ConflictError(LogError):
    """A write expected another state of the log than it found: somebody else wrote (L8)."""

    code = "log-conflict"


class SchemaError(LogError):
    """A log file of another program, or of a newer version of this one."""

    code = "log-schema"
    hint = "use the version of Gapless that wrote it, or another file"


class BackendError(GaplessError):
    """The MCP server behind a session could not be started, or is gone."""

    code = "backend-lost"


class UsageError(GaplessError):
    """A local call, setting or argument that cannot be carried out; nothing changed."""

    code = "usage"


class TargetError(UsageError):
    """A server that was to be judged cannot be: it is not there, or offers no ladder."""

    code = "target"
