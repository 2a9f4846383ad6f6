"""Runs against the plainest model there is: a list of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.log.base import Grain, Run
from gapless.log.runs import runs_of
from gapless.log.segments import DamagedError, Segment
from gapless.protocol.block import encode_event
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.settings import Limits
from tests.log.written import GRAIN, blocks, link


def one_a_segment(count: int, size: int = 0, every: float = 0.0) -> list[Segment]:
    """Segments of one event each, `every` so many seconds."""
    return [
        Segment(seq, seq, blocks(seq, seq, b"x" * size), every * (seq - 1)) for seq in range(1, count + 1)
    ]


def lasts(runs: tuple[Run, ...]) -> list[int]:
    return [run.last for run in runs]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400)), min_size=1, max_size=5), max_size=8
    ),
    st.lists(st.integers(0, 100), min_size=8, max_size=8),
    st.data(),
)
def test_runs_are_all_that_is_above_the_floor_and_nothing_else(
    written: list[list[tuple[int, int]]], pauses: list[int], data: st.DataObject
) -> None:
    segments: list[Segment] = []
    model: list[tuple[int, bytes, float]] = []
    at = 0.0
    for events, pause in zip(written, pauses, strict=False):
        first = len(model) + 1
        at += pause
        for seq, (stream, size) in enumerate(events, first):
            model.append((stream, encode_event(EventId(seq, stream, link(seq)), "message", b"x" * size), at))
        segments.append(Segment(first, len(model), b"".join(block for _, block, _ in model[first - 1 :]), at))
    floor = data.draw(st.integers(0, len(model)))
    runs = runs_of((segment for segment in segments if segment.last > floor), floor, len(model), GRAIN)
    after = floor
    for run in runs:
        mine = model[after : run.last]
        streams: dict[int, tuple[int, Link]] = {}
        for seq, (stream, _, _) in enumerate(mine, after + 1):
            streams[stream] = (seq, link(seq))
        size = sum(len(block) for _, block, _ in mine)
        assert run == Run(run.last, link(run.last), len(mine), size, mine[0][2], streams)
        assert mine[-1][2] - run.at <= 60
        after = run.last
    assert after == len(model)


def test_small_segments_are_one_run_up_to_1024_events() -> None:
    assert lasts(runs_of(one_a_segment(2500), 0, 2500, GRAIN)) == [1024, 2048, 2500]


def test_small_segments_are_one_run_up_to_a_mebibyte() -> None:
    segments = one_a_segment(10, 2**18 - len(blocks(1, 1, b"")))
    assert len(segments[0].data) == 2**18
    runs = runs_of(segments[:9], 0, 9, GRAIN)
    assert lasts(runs) == [4, 8, 9]
    assert [run.size for run in runs] == [2**20, 2**20, 2**18]


def test_small_segments_are_one_run_for_a_minute_from_the_first() -> None:
    runs = runs_of(one_a_segment(10, every=20), 0, 10, GRAIN)
    assert lasts(runs) == [4, 8, 10]
    assert [run.at for run in runs] == [0, 80, 160]


def test_a_large_segment_is_a_run_of_its_own() -> None:
    segments = [
        Segment(1, 1, blocks(1, 1)),
        Segment(2, 2001, blocks(2, 2001)),
        Segment(2002, 2002, blocks(2002, 2002, b"x" * 2**21)),
        Segment(2003, 2003, blocks(2003, 2003)),
    ]
    assert lasts(runs_of(segments, 0, 2003, GRAIN)) == [1, 2001, 2002, 2003]


def test_no_more_is_held_than_makes_a_run() -> None:
    alive = most = 0

    class Counted(bytes):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def segments() -> Iterator[Segment]:
        nonlocal alive, most
        for seq in range(1, 41):
            alive += 1
            most = max(most, alive)
            yield Segment(seq, seq, Counted(blocks(seq, seq, b"x" * 2**18)))

    assert len(runs_of(segments(), 0, 40, GRAIN)) > 10
    assert most <= 5


@pytest.mark.parametrize(
    ("segments", "committed"),
    [
        ([], 1),
        ([Segment(1, 2, blocks(1, 2))], 3),
        ([Segment(1, 2, blocks(1, 2))], 1),
        ([Segment(1, 2, blocks(1, 2)), Segment(4, 4, blocks(4, 4))], 4),
        ([Segment(1, 3, blocks(1, 2))], 3),
        ([Segment(1, 3, blocks(1, 1) + blocks(3, 3))], 3),
        ([Segment(1, 3, blocks(1, 4))], 3),
        ([Segment(2, 3, blocks(2, 3))], 3),
        ([Segment(1, 3, blocks(1, 3)[:-1])], 3),
        ([Segment(1, 3, blocks(1, 2) + blocks(4, 4))], 3),
        ([Segment(1, 1, b"\0" * 100)], 1),
    ],
)
def test_runs_of_what_was_never_written_are_damage(segments: list[Segment], committed: int) -> None:
    with pytest.raises(DamagedError, match="the log is damaged: "):
        runs_of(segments, 0, committed, GRAIN)


def test_a_run_is_no_more_than_what_is_evicted_together() -> None:
    grain = Grain.of(Limits(retain_events=1000))
    assert lasts(runs_of(one_a_segment(40), 0, 40, grain)) == [15, 30, 40]
