"""W1–W4: event-stream blocks, written in one way and read in all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import (
    COMMENT,
    Block,
    BlockDecoder,
    encode_block,
    encode_event,
    encode_prime,
)
from gapless.protocol.cursor import EventId, Link

PLENTY = 2**20
LINK = Link(bytes.fromhex("a193f6b6c59d5344"))


def decode(chunks: Iterable[bytes], limit: int = PLENTY) -> list[Block]:
    """All blocks of a stream that arrives in these pieces."""
    decoder = BlockDecoder(limit)
    return [block for chunk in chunks for block in decoder.feed(chunk)]


def singly(data: bytes) -> list[bytes]:
    """One byte at a time."""
    return [data[at : at + 1] for at in range(len(data))]


# Encoding ------------------------------------------------------------------------------------------


@pytest.mark.rule("W1")
def test_an_event_is_its_id_and_its_data() -> None:
    assert encode_event(EventId(47, 3, LINK), "message", b'{"x":1}') == (
        b'id: 47.3.a193f6b6c59d5344\ndata: {"x":1}\n\n'
    )


@pytest.mark.rule("W1")
def test_an_events_type_is_written_unless_it_is_message() -> None:
    assert encode_event(EventId(1, 0, LINK), "upgrade-accepted", b"{}") == (
        b"id: 1.0.a193f6b6c59d5344\nevent: upgrade-accepted\ndata: {}\n\n"
    )


@pytest.mark.rule("W2", "W3")
def test_a_control_block_has_no_id_and_a_message_its_number() -> None:
    assert encode_block("received", b'{"received":1}') == b'event: received\ndata: {"received":1}\n\n'
    assert encode_block("message", b"{}", "7") == b"id: 7\ndata: {}\n\n"
    assert encode_block("message", b"", "7") == b"id: 7\ndata: \n\n"
    assert decode([encode_block("message", b"", "7")]) == [Block("message", "7", b"")], "a placeholder"


@pytest.mark.rule("C6", "U10")
def test_priming_is_an_id_empty_data_and_a_retry_and_without_a_cursor_a_retry_alone() -> None:
    primed = encode_prime(EventId(3, 0, LINK), 1500)
    assert primed == b"id: 3.0.a193f6b6c59d5344\nretry: 1500\ndata: \n\n"
    assert decode([primed]) == [Block("message", "3.0.a193f6b6c59d5344", b"", 1500)]
    assert decode([encode_prime(None, 30_000)]) == [Block("message", None, None, 30_000)]


@pytest.mark.rule("C8")
def test_a_keep_alive_comment_is_no_block() -> None:
    assert decode([COMMENT, b"data: x\n\n", COMMENT]) == [Block(data=b"x")]


# Decoding: whole, split everywhere, byte by byte ---------------------------------------------------

SAMPLES = {
    "LF": b"id: 1\nevent: a\ndata: x\ndata: y\n\ndata: z\n\n",
    "CR": b"id: 1\revent: a\rdata: x\rdata: y\r\rdata: z\r\r",
    "CRLF": b"id: 1\r\nevent: a\r\ndata: x\r\ndata: y\r\n\r\ndata: z\r\n\r\n",
    "mixed": b"id: 1\nevent: a\r\ndata: x\rdata: y\n\r\ndata: z\r\r",
}
EXPECTED = [Block("a", "1", b"x\ny"), Block(data=b"z")]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.rule("W4")
def test_every_line_end_is_read_however_the_bytes_are_split(name: str) -> None:
    data = SAMPLES[name]
    assert decode([data]) == EXPECTED
    assert decode(singly(data)) == EXPECTED
    for at in range(len(data) + 1):
        assert decode([data[:at], data[at:]]) == EXPECTED, f"split at {at}"
        assert decode([data[:at], b"", data[at:]]) == EXPECTED


@pytest.mark.rule("W4")
def test_a_crlf_split_across_two_reads_is_one_line_end() -> None:
    decoder = BlockDecoder(PLENTY)
    assert decoder.feed(b"data: x\r") == []
    assert decoder.feed(b"\ndata: y\r") == []
    assert decoder.feed(b"\n\r") == [Block(data=b"x\ny")]
    assert decoder.feed(b"\ndata: z\n\n") == [Block(data=b"z")]


@pytest.mark.rule("W4")
def test_a_cr_that_ends_a_read_ends_a_line_at_once() -> None:
    """Nobody waits for the LF that may follow: with CR line ends none does."""
    decoder = BlockDecoder(PLENTY)
    assert decoder.feed(b"data: x\r\r") == [Block(data=b"x")]
    assert decoder.feed(b"data: y\r\r") == [Block(data=b"y")]


@pytest.mark.parametrize("parts", [[3], [1, 1, 1], [2, 1], [1, 2]])
@pytest.mark.rule("W4")
def test_one_leading_byte_order_mark_is_dropped_and_no_other(parts: list[int]) -> None:
    bom, chunks, at = b"\xef\xbb\xbf", [], 0
    for length in parts:
        chunks.append(bom[at : at + length])
        at += length
    assert decode([*chunks, b"data: x\n\n"]) == [Block(data=b"x")]
    assert decode([*chunks, bom + b"data: x\n\ndata: y\n\n"]) == [Block(data=b"y")], "an unknown field"
    assert decode([b"data: y\n\n" + bom + b"data: x\n\n"]) == [Block(data=b"y")]
    assert decode([b"\xef\xbbdata: x\n\ndata: y\n\n"]) == [Block(data=b"y")], "half a mark is none"


@pytest.mark.parametrize(
    "separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\0"]
)
@pytest.mark.rule("W4")
def test_lines_are_split_on_nothing_but_cr_and_lf(separator: str) -> None:
    text = f"a{separator}b".encode()
    for chunks in ([b"data: " + text + b"\n\n"], singly(b"data: " + text + b"\n\n")):
        assert decode(chunks) == [Block(data=text)]


@pytest.mark.rule("W4")
def test_an_id_that_holds_nul_is_ignored_and_its_block_is_not() -> None:
    assert decode([b"id: 1\0\ndata: x\n\n"]) == [Block(id=None, data=b"x")]
    assert decode([b"id: 1\nid: 2\0\ndata: x\n\n"]) == [Block(id="1", data=b"x")]


@pytest.mark.rule("W4")
def test_an_unterminated_tail_is_dropped_and_known_to_be_there() -> None:
    decoder = BlockDecoder(PLENTY)
    assert not decoder.pending
    assert decoder.feed(b"data: x\n\ndata: y\n") == [Block(data=b"x")]
    assert decoder.pending
    assert decoder.feed(b"\n") == [Block(data=b"y")]
    assert not decoder.pending
    decoder.feed(b"dat")
    assert decoder.pending


@pytest.mark.parametrize(
    ("retry", "value"),
    [
        (b"retry: 3000", 3000),
        (b"retry:3000", 3000),
        (b"retry: 0", 0),
        (b"retry: ", None),
        (b"retry", None),
        (b"retry: -1", None),
        (b"retry: 1.5", None),
        (b"retry: 3000ms", None),
        (b"retry: 0x10", None),
        (b"retry: 1e3", None),
        (b"retry:  5", None),
        (b"retry: 5 ", None),
        ("retry: ٣".encode(), None),
        ("retry: ²".encode(), None),
        (b"retry: " + b"9" * 5000, None),
    ],
)
@pytest.mark.rule("W4")
def test_a_retry_is_plain_digits_or_nothing(retry: bytes, value: int | None) -> None:
    (block,) = decode([retry + b"\ndata: x\n\n"])
    assert block == Block(data=b"x", retry=value)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        (b"data\n\n", Block(data=b"")),
        (b"data:\n\n", Block(data=b"")),
        (b"data: \n\n", Block(data=b"")),
        (b"data:  x\n\n", Block(data=b" x")),
        (b"data:x\n\n", Block(data=b"x")),
        (b"data: a:b\n\n", Block(data=b"a:b")),
        (b"data: a\ndata\ndata: b\n\n", Block(data=b"a\n\nb")),
        (b"event: a\nevent: b\ndata: x\n\n", Block("b", data=b"x")),
        (b"event:\ndata: x\n\n", Block(data=b"x")),
        (b"id\ndata: x\n\n", Block(id="", data=b"x")),
        (b"id: 1\n\n", Block(id="1")),
        (b"Data: no\ndata: x\n\n", Block(data=b"x")),
        (b" data: no\ndata: x\n\n", Block(data=b"x")),
        (b": data: no\ndata: x\n\n", Block(data=b"x")),
        (b"novelty: 1\ndata: x\n\n", Block(data=b"x")),
        (b"\n\n\ndata: x\n\n", Block(data=b"x")),
    ],
)
@pytest.mark.rule("W4")
def test_fields_are_read_as_the_event_stream_format_has_them(text: bytes, block: Block) -> None:
    assert decode([text]) == decode(singly(text)) == [block]


@pytest.mark.rule("W4")
def test_nothing_of_a_block_leaks_into_the_next() -> None:
    first, second = decode([b"id: 1\nevent: a\nretry: 5\ndata: x\n\ndata: y\n\n"])
    assert first == Block("a", "1", b"x", 5)
    assert second == Block(data=b"y")


@pytest.mark.parametrize("field", [b"id", b"event"])
@pytest.mark.rule("W4")
def test_an_id_or_type_that_is_not_utf_8_is_malformed(field: bytes) -> None:
    with pytest.raises(MalformedError):
        decode([field + b": \xff\n\n"])
    assert decode([b"data: \xff\n\n"]) == [Block(data=b"\xff")], "what the data is, others decide"


@pytest.mark.rule("W5")
def test_a_block_above_the_limit_is_too_large_however_it_arrives() -> None:
    fits = b"data: " + b"x" * 93 + b"\n"
    assert len(fits) == 100
    assert len(decode([fits + b"\n"], limit=101)) == 1
    for chunks in ([fits + b"\n"], singly(fits + b"\n")):
        with pytest.raises(TooLargeError):
            decode(chunks, limit=100)
    with pytest.raises(TooLargeError):
        decode([b"data: " + b"x" * 200], limit=100)
    with pytest.raises(TooLargeError):
        decode([b"data: xxxx\n"] * 20, limit=100)


@pytest.mark.rule("W5")
def test_the_limit_is_of_one_block_not_of_the_stream() -> None:
    assert len(decode([b"data: x\n\n" * 1000], limit=20)) == 1000
    assert len(decode(singly(b"data: x\r\n\r\n" * 100), limit=20)) == 100


@pytest.mark.rule("W4")
def test_a_long_line_costs_no_more_for_arriving_in_small_pieces() -> None:
    """It took 80 s of processor time once: each piece was searched together with all before it."""
    block = b"data: " + b"x" * 2**22 + b"\n\n"
    began = time.process_time()
    (read,) = decode((block[at : at + 1460] for at in range(0, len(block), 1460)), limit=2**23)
    assert len(read.data or b"") == 2**22
    assert time.process_time() - began < 10


# Against another reader of the same format ---------------------------------------------------------

_TOKENS = [
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b":",
    b": ",
    b" ",
    b"data",
    b"id",
    b"event",
    b"retry",
    b"data: x\n",
    b"id: 1.0.ab",
    b"12",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xef",
    "ü\u2028\u0085".encode(),
    b"{}",
]

streams = st.lists(st.sampled_from(_TOKENS), max_size=40).map(b"".join)


def reference(data: bytes) -> list[Block]:
    """The same format, read whole and without care for speed."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    *lines, _ = re.split(rb"\r\n|\n|\r", data)
    blocks: list[Block] = []
    event, id, retry, seen = "message", None, None, False
    texts: list[bytes] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if seen:
                blocks.append(Block(event, id, b"\n".join(texts) if texts else None, retry))
            event, id, retry, seen = "message", None, None, False
            texts = []
        elif colon and not name:
            continue
        elif name == b"data":
            texts.append(value)
            seen = True
        elif name == b"event":
            event = value.decode() or "message"
            seen = True
        elif name == b"id":
            id = id if b"\0" in value else value.decode()
            seen = True
        elif name == b"retry":
            retry = int(value) if re.fullmatch(rb"[0-9]{1,15}", value) else retry
            seen = True
    return blocks


@pytest.mark.rule("W4")
@given(streams, st.lists(st.integers(0, 200), max_size=6))
@example(b"data: x\r\n\r\n", [8, 9, 10])
@example(b"\xef\xbb\xbfdata: x\n\n", [1, 2, 3])
def test_any_bytes_split_anywhere_are_read_as_a_plain_reader_reads_them(
    data: bytes, splits: list[int]
) -> None:
    try:
        expected = reference(data)
    except UnicodeDecodeError:
        for chunks in ([data], singly(data)):
            with pytest.raises(MalformedError):
                decode(chunks)
        return
    cuts = sorted({0, len(data), *(min(at, len(data)) for at in splits)})
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    assert decode([data]) == decode(pieces) == decode(singly(data)) == expected


@pytest.mark.rule("W4", "W5")
@given(streams, st.integers(1, 40))
def test_a_limit_is_met_or_not_however_the_bytes_are_split(data: bytes, limit: int) -> None:
    outcomes: list[object] = []
    for chunks in ([data], singly(data)):
        try:
            outcomes.append(decode(chunks, limit))
        except (TooLargeError, MalformedError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.rule("W1", "W4")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["message", "upgrade-accepted", "session-superseded"]),
            st.integers(0, 2**63 - 1),
            st.binary(max_size=50).filter(lambda data: b"\n" not in data and b"\r" not in data),
        ),
        max_size=8,
    )
)
def test_what_is_encoded_is_decoded(events: list[tuple[str, int, bytes]]) -> None:
    blocks = [encode_event(EventId(seq, 0, LINK), event, data) for event, seq, data in events]
    expected = [Block(event, f"{seq}.0.{LINK.hex()}", data) for event, seq, data in events]
    assert decode([b"".join(blocks)]) == expected


@pytest.mark.rule("W4")
@given(st.one_of(streams, st.binary(max_size=60)))
def test_any_bytes_split_at_any_one_place_are_read_alike(data: bytes) -> None:
    outcomes: set[object] = set()
    for at in range(len(data) + 1):
        try:
            outcomes.add(tuple(decode([data[:at], data[at:]])))
        except MalformedError:
            outcomes.add(MalformedError)
    assert len(outcomes) == 1


one_line_texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30).map(str.encode)
names = st.sampled_from(["message", "received", "resume-cursor", "cursor-ack", "probe"])
encoded = st.one_of(
    st.tuples(names, one_line_texts, st.none() | st.integers(1, 2**63 - 1).map(str)).map(
        lambda made: (encode_block(*made), Block(made[0], made[2], made[1]))
    ),
    st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 60_000)).map(
        lambda made: (
            encode_prime(EventId(made[0], 0, LINK), made[1]),
            Block(id=f"{made[0]}.0.{LINK.hex()}", data=b"", retry=made[1]),
        )
    ),
)


@pytest.mark.rule("C6", "W2", "W3", "W4")
@given(st.lists(encoded, max_size=6), st.sampled_from([b"\n", b"\r", b"\r\n"]), st.booleans(), st.data())
def test_what_is_encoded_is_decoded_with_any_line_end_and_a_mark_before_it(
    made: list[tuple[bytes, Block]], line_end: bytes, marked: bool, draw: st.DataObject
) -> None:
    data = b"".join(text for text, _ in made).replace(b"\n", line_end)
    data = b"\xef\xbb\xbf" + data if marked else data
    at = draw.draw(st.integers(0, len(data)))
    assert decode([data[:at], data[at:]]) == [block for _, block in made]
