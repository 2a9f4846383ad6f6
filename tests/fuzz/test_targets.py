"""Each fuzz target on its seeds, and on what becomes of them; `run.py` goes on from there with atheris."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.examples import examples
from tests.fuzz.targets import TARGETS, Target

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)

_PIECES = [
    b"\n", b"\r", b"\r\n", b"\n\n", b"\0", b"\x1e", b": ", b"id: ", b"data: ", b"event: ", b"retry: ",
    b'"', b"{", b"}", b"[", b"]", b"null", b"true", b"-1", b"1e999", b"NaN", b"\\ud800", b"$C",
    b"9223372036854775808", b"\xef\xbb\xbf", b"\xc3\xbc", b"\xff", "\u2028".encode(),
]  # fmt: skip


def mutated(random: Random, seeds: tuple[bytes, ...]) -> bytes:
    """A seed, or the halves of two, a few times cut and pasted."""
    data = random.choice(seeds)
    if random.random() < 0.3:
        other = random.choice(seeds)
        data = data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]
    for _ in range(random.randint(0, 4)):
        at, gone = random.randint(0, len(data)), random.choice([0, 0, 1, 1, 4, 40])
        piece = random.choice(_PIECES) if random.random() < 0.7 else random.randbytes(random.randint(1, 4))
        data = data[:at] + piece + data[at + gone :]
    return data


def call(target: Target, data: bytes) -> None:
    """Run one input; if something comes of it, say of which."""
    try:
        target.call(data)
    except Exception as error:
        error.add_note(f"the input was {data!r}")
        raise


@every_target
def test_no_seed_brings_out_an_error_that_is_not_documented(target: Target) -> None:
    for seed in (b"", *target.seeds):
        call(target, seed)


@every_target
def test_no_change_of_a_seed_brings_out_an_error_that_is_not_documented(target: Target) -> None:
    random = Random(1)
    for _ in range(target.inputs):
        call(target, mutated(random, target.seeds))


@pytest.mark.hypothesis
@every_target
def test_no_input_brings_out_an_error_that_is_not_documented(target: Target) -> None:
    @settings(max_examples=examples(0.5))
    @given(st.randoms(use_true_random=False), st.binary(max_size=4))
    def search(random: Random, tail: bytes) -> None:
        call(target, mutated(random, target.seeds) + tail)

    search()
