"""What can be wrong with a naive server, and how large and how patient it is."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.protocol.settings import Limits

__all__ = ["NaiveSwitches"]


@dataclass(frozen=True, slots=True)
class NaiveSwitches:
    """Nothing is wrong, unless it is switched on. The first nine come from the three field reports."""

    forgets_the_gap: bool = False
    """First report. A socket gets only what is emitted after the upgrade; the gap is never sent."""
    upgrades_past_eviction: bool = False
    """First report. An upgrade from below the floor succeeds, and starts at the floor."""
    believes_echoes: bool = False
    """First report. A bare integer, such as the server's own position, is taken for a cursor."""
    no_echo: bool = False
    """Second report. Neither the 101 nor the first frame has a cursor; frames begin with what is next."""
    stale_echo: bool = False
    """Second report. The cursor of the 101 is of the request, not of the moment it takes effect."""
    frames_before_ack: bool = False
    """Second report. Nothing is held back until the cursor of the 101 is acknowledged."""
    idle_at_the_boundary: bool = False
    """Third report. A resume at a pending `U`, or without a cursor, gets 200 and an idle stream."""
    second_acceptance: bool = False
    """Third report. A fresh stream, or another nonce, mints a second `upgrade-accepted`."""
    bound_while_on_sse: bool = False
    """Third report. Sockets are not probed; and once a handshake was refused, the session stays bound."""

    replays_then_registers: bool = False
    """A resume replays what there is, and a moment later begins to listen."""
    silent_cursor: bool = False
    """An event stream from a cursor that cannot be served is 200 and idle."""
    runs_twice: bool = False
    """A message that is sent again is run again."""
    repeats: bool = False
    """A resume starts with the event that the cursor names, not after it."""
    reorders: bool = False
    """What is emitted during a resume is sent ahead of what the resume asked for."""
    forgets_the_result: bool = False
    """A result that comes while nobody is connected is not stored."""
    ends_early: bool = False
    """A resumed stream of a call is over once it has caught up, finished or not.

    Only in the stream view: in the session view a stream that ends is resumed, and nothing is lost.
    """
    shares_cursors: bool = False
    """An event ID is looked up among all sessions, and what follows it there is sent."""
    one_queue: bool = False
    """All that is sent to anybody goes through one queue of one: a slow reader holds up the others."""

    retain_events: int = 10_000
    """Events kept for each session."""
    retry_ms: int = 1000
    """The `retry:` of the stream view, in milliseconds."""
    keepalive: float = 15.0
    ack_window: float = 10.0
    upgrade_window: float = 30.0
    probe_timeout: float = 1.0
    """Seconds, as in `gapless.Limits`."""

    @property
    def limits(self) -> Limits:
        """What is advertised."""
        return Limits(
            retain_events=self.retain_events,
            keepalive=self.keepalive,
            ack_window=self.ack_window,
            upgrade_window=self.upgrade_window,
            probe_timeout=self.probe_timeout,
        )
