"""What a log retains of an outbox, as runs of events: what the machine evicts by (L4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gapless.log.base import Grain, Run
from gapless.log.segments import DamagedError, Segment
from gapless.protocol.cursor import Link

__all__ = ["runs_of"]


def runs_of(segments: Iterable[Segment], floor: int, committed: int, grain: Grain) -> tuple[Run, ...]:
    """The runs of events `floor + 1 … committed`, as `Log.runs` has them.

    Args:
        segments: those that reach above the floor, in order. No more of them are held than make a run.
        grain: how much of what follows each other makes one run: a run for each of very many would be much.

    Raises:
        DamagedError: the segments do not hold just these events.
    """
    found: list[Run] = []
    last = floor
    for segment in _together(segments, grain):
        found.append(_run(segment, last))
        last = segment.last
    if last != committed:
        raise DamagedError(f"events end at {last}, not at {committed}")
    return tuple(found)


def _together(segments: Iterable[Segment], grain: Grain) -> Iterator[Segment]:
    """Segments that are one run as one segment."""
    group: list[Segment] = []
    size = 0
    for segment in segments:
        if group and (
            segment.last - group[0].first >= grain.events
            or size + len(segment.data) > grain.bytes
            or segment.at - group[0].at > grain.seconds
        ):
            yield _joined(group)
            group, size = [], 0
        group.append(segment)
        size += len(segment.data)
    if group:
        yield _joined(group)


def _joined(group: list[Segment]) -> Segment:
    first, last = group[0], group[-1]
    return Segment(first.first, last.last, b"".join([segment.data for segment in group]), first.at)


def _run(segment: Segment, after: int) -> Run:
    """The events of a segment above `after` as a run."""
    streams: dict[int, tuple[int, Link]] = {}
    link = Link(b"")
    for seq, (stream, link) in enumerate(segment.ids(after), after + 1):
        streams[stream] = (seq, link)
    size = segment.start(segment.last + 1) - segment.start(after + 1)
    return Run(segment.last, link, segment.last - after, size, segment.at, streams)
