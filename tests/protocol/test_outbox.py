"""The outbox: what is appended together is numbered, linked and gathered as one by one (L1, L4, L5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.protocol.cursor import Link
from gapless.protocol.outbox import Grain, Outbox, Run

LINK = Link(b"eight by")

Append = tuple[int, list[bytes], float]
"""A stream, a run of events, and the seconds that pass before."""

appends = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(2, 90).map(lambda size: b"x" * size), min_size=1, max_size=12),
        st.sampled_from([0.0, 1.0, 9.0]),
    ),
    max_size=6,
)
grains = st.builds(Grain, st.integers(0, 7), st.sampled_from([1, 100, 250, 10_000]), st.just(5.0))


def held(outbox: Outbox) -> tuple[list[Run], int, Link, bytes]:
    """What it knows of the events it has, and the events."""
    segment = outbox.take()
    return outbox._marks, segment.last, segment.link, segment.data  # pyright: ignore[reportPrivateUsage]


@pytest.mark.rule("L4", "L5")
@given(grain=grains, appended=appends)
def test_a_run_that_is_appended_is_what_its_events_would_be_one_by_one(
    grain: Grain, appended: list[Append]
) -> None:
    together, singly = Outbox(LINK, grain), Outbox(LINK, grain)
    now = 0.0
    for stream, run, pause in appended:
        now += pause
        last = together.append(stream, "message", run, now)
        assert [singly.append(stream, "message", [data], now) for data in run][-1] == last
    marks, last, _, data = found = held(together)
    assert found == held(singly)
    assert sum(mark.size for mark in marks) == len(data)
    assert sum(mark.events for mark in marks) == last
    for mark in marks:
        assert mark.events <= max(1, grain.events), "what is evicted together is no more than a grain"
