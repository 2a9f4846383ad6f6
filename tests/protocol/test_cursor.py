"""L5, C1–C3: event IDs, cursors, and the chain that proves them."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gapless.errors import MalformedError
from gapless.protocol.cursor import (
    MAX_SEQ,
    START,
    EventId,
    Link,
    Start,
    link_after,
    parse_cursor,
    parse_event_id,
)

LINK = "0123456789abcdef"

links = st.binary(min_size=8, max_size=8).map(Link)
numbers = st.integers(0, MAX_SEQ)
event_ids = st.builds(EventId, numbers, numbers, links)


@pytest.mark.rule("L5")
def test_the_link_is_that_of_the_protocols_own_vector() -> None:
    start = Link(bytes.fromhex("0001020304050607"))
    data = b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'
    first = link_after(start, 0, "message", data)
    assert first.hex() == "a193f6b6c59d5344"
    second = link_after(first, 0, "upgrade-accepted", b'{"negotiation":"n1","ticket":null}')
    assert second.hex() == "f229826b039d4187"


@pytest.mark.rule("L5")
@given(links, numbers, st.sampled_from(["message", "upgrade-accepted"]), st.binary())
def test_a_link_is_8_bytes_of_sha256_over_link_stream_event_and_data(
    previous: Link, stream: int, event: str, data: bytes
) -> None:
    text = previous + str(stream).encode() + b"\n" + event.encode() + b"\n" + data
    assert link_after(previous, stream, event, data) == sha256(text).digest()[:8]


@pytest.mark.rule("L5")
@given(links, st.integers(0, 99), st.binary(max_size=20), st.integers(0, 63))
def test_a_link_depends_on_every_bit_before_it(previous: Link, stream: int, data: bytes, bit: int) -> None:
    here = link_after(previous, stream, "message", data)
    flipped = bytearray(previous)
    flipped[bit // 8] ^= 1 << bit % 8
    assert link_after(Link(bytes(flipped)), stream, "message", data) != here
    assert link_after(previous, stream + 1, "message", data) != here
    assert link_after(previous, stream, "other", data) != here
    assert link_after(previous, stream, "message", data + b" ") != here


@pytest.mark.rule("L5")
def test_no_data_can_be_mistaken_for_another_stream_or_type() -> None:
    start = Link(bytes(8))
    assert link_after(start, 1, "message", b"x") != link_after(start, 11, "message", b"x")
    assert link_after(start, 0, "a", b"b") != link_after(start, 0, "ab", b"")


@pytest.mark.rule("L5", "C7")
def test_an_event_of_any_type_has_a_link_so_that_one_which_does_not_follow_is_found() -> None:
    start = Link(bytes(8))
    assert link_after(start, 0, "é", b"") == sha256(start + "0\né\n".encode()).digest()[:8]


@pytest.mark.rule("C1")
@given(event_ids)
@example(EventId(0, 0, Link(bytes(8))))
@example(EventId(MAX_SEQ, MAX_SEQ, Link(b"\xff" * 8)))
def test_an_event_id_is_read_back_as_it_was_written(event_id: EventId) -> None:
    assert parse_event_id(str(event_id)) == event_id
    assert parse_cursor(str(event_id)) == event_id


@pytest.mark.rule("C1")
def test_an_event_id_is_seq_stream_and_16_lower_case_hex_digits() -> None:
    assert str(EventId(47, 0, Link(bytes.fromhex("a193f6b6c59d5344")))) == "47.0.a193f6b6c59d5344"
    assert parse_event_id("47.0.a193f6b6c59d5344").link == bytes.fromhex("a193f6b6c59d5344")


@pytest.mark.rule("C1")
def test_the_bare_0_is_the_start_as_a_cursor_and_no_event_id() -> None:
    assert parse_cursor("0") is START
    assert isinstance(START, Start)
    assert (START.seq, str(START), repr(START)) == (0, "0", "START")
    with pytest.raises(MalformedError):
        parse_event_id("0")


MALFORMED = [
    "",
    " ",
    "0 ",
    " 0",
    "00",
    "-0",
    "+0",
    "0.0",
    "1",
    "47",
    f"01.0.{LINK}",
    f"1.00.{LINK}",
    f"-1.0.{LINK}",
    f"+1.0.{LINK}",
    f"1.-1.{LINK}",
    f" 1.0.{LINK}",
    f"1.0.{LINK} ",
    f"1.0.{LINK}\n",
    f"\n1.0.{LINK}",
    f"1.0.{LINK}\r\n",
    f"1.0.{LINK}\0",
    f"1. 0.{LINK}",
    f"1..0.{LINK}",
    f"1.0.{LINK}.",
    f".1.0.{LINK}",
    f"1.0.0.{LINK}",
    f"1.{LINK}",
    f"1,0,{LINK}",
    f"1:0:{LINK}",
    f"1.0.{LINK[:-1]}",
    f"1.0.{LINK}0",
    f"1.0.{LINK.upper()}",
    f"1.0.{'g' * 16}",
    f"1.0.{'é' * 16}",
    "1.0.",
    "1.0.0x23456789abcdef",
    f"{2**63}.0.{LINK}",
    f"1.{2**63}.{LINK}",
    f"{2**64}.0.{LINK}",
    f"{10**30}.0.{LINK}",
    f"\u0664\u0667.0.{LINK}",
    f"\uff11.0.{LINK}",
    f"².0.{LINK}",
    "1.0." + "\u0660" * 16,
    f"1e1.0.{LINK}",
    f"1_0.0.{LINK}",
    f"0x1.0.{LINK}",
    f"1.0.{LINK},2.0.{LINK}",
    "9" * 10_000,
    "1.0." + "a" * 10_000,
    "null",
    "None",
    "START",
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.rule("C1", "C2")
def test_everything_else_is_malformed(text: str) -> None:
    for parse in (parse_cursor, parse_event_id):
        with pytest.raises(MalformedError) as caught:
            parse(text)
        assert len(str(caught.value)) < 400, "what is refused is not repeated at length"


@pytest.mark.rule("C1", "C2")
@given(st.integers(1, 2**70))
def test_a_bare_integer_is_no_cursor(number: int) -> None:
    with pytest.raises(MalformedError):
        parse_cursor(str(number))


@pytest.mark.rule("C1")
@given(st.one_of(st.text(), st.text("0123456789abcdefABCDEF.-+ \n", max_size=30)))
def test_whatever_is_accepted_is_the_one_form(text: str) -> None:
    try:
        cursor = parse_cursor(text)
    except MalformedError:
        return
    assert str(cursor) == text


@pytest.mark.rule("C1")
@given(event_ids, st.integers(0, 60), st.sampled_from("0123456789abcdefA. -\n\u0664"))
def test_a_character_changed_or_added_is_another_cursor_or_none(
    event_id: EventId, at: int, other: str
) -> None:
    text = str(event_id)
    at %= len(text)
    for changed in (text[:at] + other + text[at + 1 :], text[:at] + other + text[at:]):
        if changed == text:
            continue
        with suppress(MalformedError):
            assert parse_event_id(changed) != event_id
