"""W4, W5, M6: what is read of a JSON-RPC message, and what is none."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import MalformedError
from gapless.protocol.jsonrpc import Envelope, Kind, error_response, one_line, peek, peek_lines, salvage


def message(**fields: Any) -> bytes:
    """A JSON-RPC message."""
    return json.dumps({"jsonrpc": "2.0", **fields}).encode()


# Kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [1, 0, -5, 2**63 - 1, -(2**63), "1", "", "a b", "ü\u2028"])
@pytest.mark.rule("M6")
def test_a_request_has_a_method_and_an_id(id: int | str) -> None:
    assert peek(message(id=id, method="tools/call", params={})) == Envelope(Kind.REQUEST, id, "tools/call")


@pytest.mark.rule("M6")
def test_1_and_the_text_1_are_different_ids() -> None:
    assert peek(message(id=1, method="x")).id != peek(message(id="1", method="x")).id


@pytest.mark.parametrize("id", [None, True, 1.5, 1.0, [], {}, 2**63, -(2**63) - 1, 10**40])
def test_any_other_id_is_malformed(id: Any) -> None:
    with pytest.raises(MalformedError):
        peek(message(id=id, method="x"))
    if id is not None:
        with pytest.raises(MalformedError):
            peek(message(id=id, result={}))


def test_a_notification_has_a_method_and_no_id() -> None:
    assert peek(message(method="notifications/x")) == Envelope(Kind.NOTIFICATION, method="notifications/x")


@pytest.mark.parametrize("params", [None, [], [1], "text", 7, {"a": []}, {"_meta": None}, {"_meta": 7}])
def test_params_of_any_shape_are_somebody_elses_affair(params: Any) -> None:
    assert peek(message(method="x", params=params)).token is None
    assert peek(message(id=1, method="x", params=params)).token is None


@pytest.mark.parametrize("value", [{}, None, 0, [], "x"])
def test_a_response_has_a_result_or_an_error(value: Any) -> None:
    assert peek(message(id=3, result=value)) == Envelope(Kind.RESPONSE, 3)
    assert peek(message(id="3", error=value)) == Envelope(Kind.RESPONSE, "3")


def test_an_error_may_have_no_id() -> None:
    assert peek(message(id=None, error={})) == peek(message(error={})) == Envelope(Kind.RESPONSE)


def test_a_progress_token_is_read_where_it_is_handed_out_and_where_it_is_reported_on() -> None:
    for token in ("a", 7, ""):
        params = {"_meta": {"progressToken": token}, "progressToken": "other"}
        assert peek(message(id=1, method="x", params=params)).token == token
        reported = message(method="notifications/progress", params={"progressToken": token, "progress": 1})
        assert peek(reported).token == token


def test_a_cancellation_names_its_target() -> None:
    for id in (7, "7"):
        cancelled = message(method="notifications/cancelled", params={"requestId": id})
        assert peek(cancelled).target == id
    assert peek(message(method="notifications/cancelled", params={"requestId": None})).target is None


@pytest.mark.parametrize(
    "data",
    [
        b'{"jsonrpc":"2.0","method":"x","params":{"a":1,"b":[true,false,null,-1.5e3,"\\u00fc\\n"]}}',
        b'  {"jsonrpc" : "2.0" , "method" : "x" }  ',
        '{"jsonrpc":"2.0","method":"ü\u2028\u2029\u0085"}'.encode(),
        b'{"method":"x","novelty":[[]],"jsonrpc":"2.0"}',
        b'{"jsonrpc":"2.0","method":"x","params":{"x":"\\ud83d\\ude00"}}',
        b'{"jsonrpc":"2.0","method":"x","params":{"n":123456789012345678901234567890}}',
    ],
)
@pytest.mark.rule("W4")
def test_valid_json_on_one_line_is_read(data: bytes) -> None:
    assert peek(data).kind is Kind.NOTIFICATION


# What is none --------------------------------------------------------------------------------------

PARAMS = {
    "NaN": b"NaN",
    "Infinity": b"[Infinity]",
    "minus Infinity": b"-Infinity",
    "a lone high surrogate": b'"\\ud800"',
    "a lone low surrogate": b'"\\udc00x"',
    "a high surrogate before another": b'"\\ud800\\ud800"',
    "a surrogate in a key": b'{"\\ud800":1}',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "invalid UTF-8": b'"\xff"',
    "cut UTF-8": b'"\xc3"',
    "overlong UTF-8": b'"\xc0\x80"',
    "a raw NUL": b'"\0"',
    "a raw tab": b'"\t"',
    "a raw control": b'"\x1f"',
    "a raw LF": b'"\n"',
    "a raw CR": b'"\r"',
    "a raw LF outside strings": b"{\n}",
    "an unknown escape": b'"\\x41"',
    "a short escape": b'"\\u12"',
    "single quotes": b"'x'",
    "a trailing comma": b"[1,]",
    "a trailing comma in an object": b'{"a":1,}',
    "no value": b"",
    "a leading zero": b"01",
    "a bare fraction": b".5",
    "an empty fraction": b"1.",
    "an empty exponent": b"1e",
    "a plus": b"+1",
    "a minus alone": b"-",
    "half a word": b"tru",
    "a capital word": b"True",
    "an unclosed array": b"[1",
    "an unclosed text": b'"x',
    "a comment": b"1/**/",
    "deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.rule("W4")
def test_a_payload_that_is_not_single_line_valid_utf_8_json_is_malformed(name: str) -> None:
    for text in (
        b'{"jsonrpc":"2.0","id":1,"method":"x","params":' + PARAMS[name] + b"}",
        b'{"jsonrpc":"2.0","id":1,"result":' + PARAMS[name] + b"}",
        b'{"jsonrpc":"2.0","id":1,"method":"x","novelty":' + PARAMS[name] + b"}",
        b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"_meta":{"x":' + PARAMS[name] + b"}}}",
    ):
        with pytest.raises(MalformedError):
            peek(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"null",
        b"true",
        b"1",
        b'"text"',
        b"[]",
        b"{}",
        b'[{"jsonrpc":"2.0","method":"x"}]',
        b'{"jsonrpc":"2.0","method":"x"}{"jsonrpc":"2.0","method":"y"}',
        b'{"jsonrpc":"2.0","method":"x"} x',
        b'{"jsonrpc":"2.0"}',
        b'{"jsonrpc":"2.0","id":1}',
        b'{"jsonrpc":"2.0","method":7}',
        b'{"jsonrpc":"2.0","method":null}',
        b'{"jsonrpc":"1.0","method":"x"}',
        b'{"jsonrpc":2.0,"method":"x"}',
        b'{"method":"x"}',
        b'{"jsonrpc":"2.0","method":"x"',
        b"\xef\xbb\xbf" + b'{"jsonrpc":"2.0","method":"x"}',
    ],
)
@pytest.mark.rule("W5")
def test_what_is_no_single_message_is_malformed_batches_included(data: bytes) -> None:
    with pytest.raises(MalformedError):
        peek(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.rule("W4")
@given(json_values, st.booleans())
def test_any_valid_payload_passes(value: Any, ascii: bool) -> None:
    text = json.dumps({"jsonrpc": "2.0", "method": "x", "params": value}, ensure_ascii=ascii, allow_nan=False)
    assert peek(text.encode()).method == "x"


_PIECES = [
    b'"',
    b"\\",
    b"u",
    b"d800",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"1",
    b"-",
    b".",
    b"e",
    b"0",
    b"null",
]
_PIECES += [b"true", b" ", b"\t", b"\n", b"\r", b"\0", b"\xff", "ü".encode(), b'"a"', b"NaN", b"\x7f", b"\\n"]


def _strict(data: bytes) -> bool:
    """Whether the standard library takes it for JSON, constants and lone surrogates apart."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        found = json.loads(data.decode(), parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


@pytest.mark.rule("W4")
@given(st.lists(st.sampled_from(_PIECES), max_size=12).map(b"".join))
def test_what_passes_is_one_line_that_any_json_reader_reads(payload: bytes) -> None:
    data = b'{"jsonrpc":"2.0","method":"x","params":' + payload + b"}"
    try:
        peek(data)
    except MalformedError:
        assert not _strict(data) or b"\n" in data or b"\r" in data
        return
    assert _strict(data)
    assert b"\n" not in data
    assert b"\r" not in data


@pytest.mark.rule("W4")
@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_pass_or_be_malformed(data: bytes) -> None:
    for read in (peek, one_line):
        with suppress(MalformedError):
            read(data)
    salvage(data)


# One line ------------------------------------------------------------------------------------------


@pytest.mark.rule("W4")
def test_line_ends_outside_texts_are_taken_out() -> None:
    data = b'\r\n{\r\n  "jsonrpc": "2.0",\n  "method": "a \\n b"\r}\n\n'
    line = one_line(data)
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line) == json.loads(data)
    assert peek(line).method == "a \n b"


def test_what_is_on_one_line_already_stays_as_it_is() -> None:
    data = b'{"jsonrpc": "2.0",  "n": 1.50, "x": "\\u00fc"}'
    assert one_line(data) is data
    assert one_line(b" \n" + data + b"\t\r\n") == data


@pytest.mark.parametrize("data", [b"{\n", b'{"a":\n01}', b'"\nx"', b"[\n,]"])
@pytest.mark.rule("W4")
def test_several_lines_that_are_no_json_are_malformed_or_stay_so(data: bytes) -> None:
    try:
        line = one_line(data)
    except MalformedError:
        return
    with pytest.raises(MalformedError):
        peek(line)


@pytest.mark.rule("W4")
@given(json_values, st.sampled_from([1, 2, 4]))
def test_a_reformatted_message_says_the_same(value: Any, indent: int) -> None:
    text = json.dumps({"x": value}, indent=indent)
    line = one_line(text.encode())
    assert b"\n" not in line
    assert json.loads(line) == {"x": value}


# Salvage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "id"),
    [
        (b'{"jsonrpc":"2.0","id":7,"method":"x","params":NaN}', 7),
        (b'{"jsonrpc":"2.0","id":"a","method":"x","params":"\\ud800"}', "a"),
        (b'{"jsonrpc":"2.0","id":7,"method":"x","params":"\xff"}', 7),
        (b'{"jsonrpc":"1.0","id":7,"method":"x"}', 7),
        (b'{\n"id":7,"method":"x"}', 7),
        (b'{"id":"\\ud800","method":"x"}', "?"),
    ],
)
@pytest.mark.rule("L6", "W4")
def test_the_id_of_a_malformed_request_is_read_where_it_can_be(data: bytes, id: int | str) -> None:
    found = salvage(data)
    assert found == Envelope(Kind.REQUEST, id, "x")
    json.dumps(found.id).encode() if found else None
    assert peek(error_response(id, -32600, "no")).id == id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no json",
        b"[]",
        b'[{"jsonrpc":"2.0","id":1,"method":"x"}]',
        b'{"jsonrpc":"2.0","method":"x"}',
        b'{"jsonrpc":"2.0","id":1}',
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
        b'{"jsonrpc":"2.0","id":null,"method":"x"}',
        b'{"jsonrpc":"2.0","id":1.5,"method":"x"}',
        b'{"jsonrpc":"2.0","id":true,"method":"x"}',
        b'{"jsonrpc":"2.0","id":18446744073709551616,"method":"x"}',
        b'{"jsonrpc":"2.0","id":1,"method":7}',
        b"[" * 100_000,
    ],
)
@pytest.mark.rule("L6")
def test_nobody_waits_for_what_is_no_request(data: bytes) -> None:
    assert salvage(data) is None


@pytest.mark.rule("W4")
def test_an_error_is_one_line_under_its_id() -> None:
    assert error_response(7, -32000, "no", {"reason": "x"}) == (
        b'{"jsonrpc":"2.0","id":7,"error":{"code":-32000,"message":"no","data":{"reason":"x"}}}'
    )
    assert peek(error_response(None, -32000, "a\nb")) == Envelope(Kind.RESPONSE)


# Many at once ----------------------------------------------------------------------------------------

LINES = [
    b"",
    b" \t",
    b"nonsense",
    message(method="x"),
    message(method="notifications/progress", params={"progressToken": 1}),
    b"  " + message(id=1, method="y") + b"\t",
    b'{"jsonrpc":"2.0",\r"method":"x"}',
    b'{"jsonrpc":"2.0","method":"\r"}',
    b'{"jsonrpc":"2.0","method":"x"}{}',
    b'{"jsonrpc":"2.0","method":"x","params":"',
    b'"}',
    '{"jsonrpc":"2.0","id":1,"result":"ü\u2028"}'.encode(),
    b'{"jsonrpc":"2.0","id":1,"result":"\xff"}',
    b'{"jsonrpc":"2.0","id":1,"result":"\xc3',
    b'\xbc"}',
]


def by_itself(line: bytes) -> tuple[bytes, Envelope | str | None]:
    """What one line says."""
    try:
        line = one_line(line)
        return line, peek(line) if line else None
    except MalformedError as error:
        return line, str(error)


@given(st.lists(st.sampled_from(LINES), max_size=8))
@pytest.mark.rule("W4", "W5")
def test_of_many_lines_each_says_what_it_says_by_itself(lines: list[bytes]) -> None:
    for line, (told, envelope) in zip(lines, peek_lines(lines), strict=True):
        text = str(envelope) if isinstance(envelope, MalformedError) else envelope
        alone, expected = by_itself(line)
        assert text == expected
        if isinstance(envelope, Envelope):
            assert told.strip(b" \t") == alone
