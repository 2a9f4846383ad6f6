"""What is remembered of streams that are finished, and for how long (M4)."""

from __future__ import annotations

import pytest

from gapless.protocol.cursor import EventId, Link
from gapless.protocol.outbox import Grain, Outbox
from gapless.protocol.settings import Limits
from gapless.protocol.streams import Streams

LINK = Link(b"eight by")


def answered(count: int) -> tuple[Streams, Outbox]:
    """So many requests, each with one event: its answer. One more is still open, and has one, too."""
    streams, outbox = Streams(), Outbox(LINK, Grain.of(Limits()))
    for seq in range(1, count + 2):
        stream = streams.open()
        streams.prime(stream, EventId(seq, stream, LINK))
        streams.note(stream, seq)
        outbox.acks[stream] = seq
        outbox.evicted[stream] = (seq, LINK)
        if seq <= count:
            streams.finish(stream)
    return streams, outbox


@pytest.mark.rule("M4")
def test_the_last_1024_finished_streams_are_remembered_and_nothing_is_left_of_others() -> None:
    streams, outbox = answered(3000)
    for floor in (0, 1500, 1501, 3001):
        outbox.floor = floor
        streams.forget(outbox)
    kept = [*range(3000 - 1023, 3002)]
    assert [stream for stream in range(3002) if streams.last(stream)] == kept
    assert [stream for stream in range(3002) if streams.primes(stream)] == kept
    assert sorted(outbox.acks) == sorted(outbox.evicted) == kept
    assert (len(streams._gone), streams._done) == (1024, [])


@pytest.mark.rule("M4")
def test_a_stream_with_an_event_above_the_floor_is_not_forgotten_however_many_there_are() -> None:
    streams, outbox = answered(3000)
    outbox.floor = 1000
    streams.forget(outbox)
    assert all(streams.last(stream) == stream for stream in range(1, 3002))
    assert (len(streams._gone), len(streams._done)) == (1000, 2000)
    assert streams.copy()._done == streams._done
