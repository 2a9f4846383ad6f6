"""An audit names what is wrong with a log or with what a client processed, and where, and nothing else."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from gapless.client.receipts import Line, Turn
from gapless.log.base import SessionKey
from gapless.log.memory import MemoryLog
from gapless.log.snapshot import snapshot
from gapless.protocol.block import encode_event
from gapless.protocol.cursor import EventId, Link, link_after
from gapless.protocol.record import read_record
from gapless.protocol.refusal import Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import View
from gapless.torture.audit import Report, audit
from gapless.torture.audit.chain import Chain
from gapless.torture.audit.findings import MOST, Findings
from gapless.torture.audit.settling import Settled
from tests.torture.logged import TOKEN, Paper, Written, damage, event_id, ids, write_log

Found = list[tuple[str, int, int]]


def look(path: Path, paper: Paper | None = None, session: str = "") -> list[Report]:
    with snapshot(path) as log:
        return asyncio.run(audit(log, [] if paper is None else paper.read(), session))


def only(path: Path, paper: Paper | None = None) -> Report:
    (report,) = look(path, paper)
    return report


def found(report: Report) -> Found:
    """The violations, in short."""
    return [(finding.kind.label, finding.first, finding.last) for finding in report.violations]


def notes(report: Report) -> Found:
    return [(finding.kind.label, finding.first, finding.last) for finding in report.notes]


async def talk(session: Written) -> None:
    """Ten events in five commits, a request answered, one cancelled, one open."""
    await session.ask(1, "two", 3)
    await session.note(3)  # 1 … 3
    await session.answer(1)  # 4
    await session.cancel("two")
    await session.note(2)  # 5, 6
    await session.upgrade("n", steps=1)  # 7
    await session.note(3)  # 8 … 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.db", talk)


# A log alone -----------------------------------------------------------------------------------------


def test_a_sound_log_is_found_sound_and_its_requests_are_accounted_for(path: Path) -> None:
    report = only(path)
    assert (found(report), notes(report)) == ([], [])
    assert (report.committed, report.floor, report.received) == (10, 0, 4)
    assert report.requests == Settled(requests=3, answered=1, cancelled=1, open=1)
    assert (report.view, report.state, report.ended) == ("session", "sse_active", None)


def test_a_session_that_ended_in_good_order_is_found_sound(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await talk(session)
        await session.end()

    report = only(write_log(tmp_path / "log.db", fill))
    assert (found(report), notes(report)) == ([], [])
    assert report.requests == Settled(requests=3, answered=2, outcome_unknown=1, cancelled=1)
    assert report.ended == "session-ended"


def test_a_session_of_standard_mcp_is_found_sound(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.ask(1, 2)
        await session.note(3)
        await session.answer(2, 1)
        await session.ask(1)
        await session.end()

    report = only(write_log(tmp_path / "log.db", fill, view=View.STREAM))
    assert (found(report), notes(report)) == ([], [])
    assert report.requests == Settled(requests=3, answered=3, outcome_unknown=1)


async def test_a_log_in_memory_is_audited_as_well() -> None:
    log = MemoryLog()
    await log.start()
    session = Written(log)
    await session.open()
    await talk(session)
    (report,) = await audit(log)
    assert found(report) == []
    assert report.requests.requests == 3


@pytest.mark.rule("L5", "W1")
def test_any_byte_flipped_in_a_segment_is_laid_to_the_event_it_is_of() -> None:
    link = start = Link(b"linklink")
    blocks: list[bytes] = []
    for seq in range(10, 15):
        type, data = "upgrade-accepted" if seq == 12 else "message", b'{"n":%d}' % seq
        link = link_after(link, 0, type, data)
        blocks.append(encode_event(EventId(seq, 0, link), type, data))
    whole = b"".join(blocks)
    half = len(b"".join(blocks[:3]))  # up to 12
    owners = [seq for seq, block in enumerate(blocks, 10) for _ in block]
    for at, byte in enumerate(whole):
        for other in {byte ^ 1, byte ^ 2, byte ^ 32, byte ^ 128, 10, 13} - {byte}:
            flipped = whole[:at] + bytes([other]) + whole[at + 1 :]
            for pages in [(flipped, 14)], [(flipped[:half], 12), (flipped[half:], 14)]:
                findings = Findings()
                chain = Chain(9, start, findings)
                for page, upto in pages:
                    list(chain.feed(page, upto))
                chain.end(14, link)
                named = {(finding.first, finding.last) for finding in findings}
                assert named == {(owners[at], owners[at])}, (at, other, [f.text for f in findings])


@pytest.mark.rule("L5")
def test_a_byte_flipped_in_the_file_is_found(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        number, data = db.execute("SELECT id, data FROM segment WHERE first = 5").get
    at = data.index(b'"n": 6')
    damage(path, "UPDATE segment SET data = ? WHERE id = ?", data[:at] + b'"n": 7' + data[at + 6 :], number)
    assert found(only(path)) == [("events-altered", 6, 6)]


@pytest.mark.rule("L1")
@pytest.mark.parametrize(("first", "last"), [(1, 3), (4, 4), (5, 6), (8, 10)])
def test_a_segment_deleted_is_missing_from_the_log(path: Path, first: int, last: int) -> None:
    damage(path, "DELETE FROM segment WHERE first = ?", first)
    report = only(path)
    assert found(report) == [("events-missing", first, last)]
    # The fourth was an answer; whether it was is not known any more.
    assert notes(report) == ([("settled-unseen", 1, 1)] if first == 4 else [])


@pytest.mark.rule("L1")
def test_two_segments_deleted_side_by_side_are_one_range(path: Path) -> None:
    damage(path, "DELETE FROM segment WHERE first IN (5, 7)")
    assert found(only(path)) == [("events-missing", 5, 7)]


@pytest.mark.rule("L1")
def test_a_segment_that_is_there_twice_is_repeated(path: Path) -> None:
    damage(path, "INSERT INTO segment SELECT NULL, session, first, 5, data, at FROM segment WHERE first = 5")
    assert found(only(path)) == [("events-repeated", 5, 6)]


@pytest.mark.rule("L1")
def test_nothing_is_missing_beyond_what_is_committed_whatever_a_segment_says_of_itself(path: Path) -> None:
    damage(path, "UPDATE segment SET last = 7000 WHERE first = 8")
    assert found(only(path)) == []


@pytest.mark.rule("L2")
def test_events_above_what_is_committed_and_a_link_that_is_not_the_last(path: Path) -> None:
    damage(path, "UPDATE session SET committed = 8")
    assert found(only(path)) == [("events-above", 9, 10)]
    damage(path, "UPDATE session SET committed = 10, link = x'0011223344556677'")
    assert found(only(path)) == [("head-differs", 10, 10)]


@pytest.mark.rule("L3", "L4")
def test_what_is_evicted_is_told_and_no_violation(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.ask(1, 2)
        await session.answer(1)
        for _ in range(150):
            await session.note(1)
        await session.answer(2)

    report = only(write_log(tmp_path / "log.db", fill, retain_events=64))
    assert report.floor > 64
    assert (found(report), notes(report)) == ([], [("settled-unseen", 1, 1)])
    assert report.requests == Settled(requests=2, answered=1, unseen=1)


@pytest.mark.rule("L3")
def test_evicted_events_that_still_lie_in_the_file_are_passed_over(path: Path) -> None:
    link = bytes.fromhex(ids(path)[2].split(".")[2])
    damage(path, "UPDATE session SET floor = 2, floor_link = ?", link)
    assert found(only(path)) == []
    damage(path, "UPDATE session SET floor_link = x'0011223344556677'")
    assert found(only(path)) == [("events-altered", 3, 3)]


@pytest.mark.rule("L6")
def test_holes_in_the_inbox_are_named(path: Path) -> None:
    damage(path, "DELETE FROM inbox WHERE number = 1")
    assert found(only(path)) == [("messages-missing", 1, 1)]  # so its answer is no answer to nobody


@pytest.mark.rule("L6")
def test_an_inbox_that_ends_early_or_late_is_named(path: Path) -> None:
    damage(path, "UPDATE session SET received = 6")
    assert found(only(path)) == [("messages-missing", 5, 6)]
    damage(path, "UPDATE session SET received = 3")
    assert found(only(path)) == [("messages-above", 4, 4)]


@pytest.mark.rule("L6")
def test_a_message_that_is_no_json_is_a_violation_and_one_with_another_digest_is_told(path: Path) -> None:
    damage(path, "UPDATE inbox SET data = ? WHERE number = 4", b"no json")
    report = only(path)
    assert found(report) == [("messages-unreadable", 4, 4)]
    assert notes(report) == [("reformatted", 4, 4), ("settled-unseen", 2, 2)]  # it may have cancelled that


@pytest.mark.rule("L7", "S6")
def test_a_request_that_an_ended_session_left_waiting_is_named(tmp_path: Path) -> None:
    async def forget(session: Written) -> None:
        await session.ask(1, 2, 3)
        await session.answer(2)
        del session.machine.inbox.open[3]
        await session.end()

    report = only(write_log(tmp_path / "log.db", forget))
    assert found(report) == [("request-unsettled", 3, 3)]
    assert report.violations[0].text == "message 3: never settled (tools/call, request 3)"


@pytest.mark.rule("L7")
def test_a_request_that_is_still_open_when_its_session_has_ended_is_a_violation(path: Path) -> None:
    change(path, state=SessionState.TERMINATED, reason=Reason.SESSION_ENDED)
    report = only(path)
    assert found(report) == [("request-unsettled", 3, 3), ("end-missing", 10, 10)]
    assert report.requests.open == 0


@pytest.mark.rule("L7")
def test_a_request_that_is_neither_open_nor_settled_is_a_violation_in_a_living_session(path: Path) -> None:
    change(path, open=())
    assert found(only(path)) == [("request-unsettled", 3, 3)]


def change(path: Path, **changes: Any) -> None:
    """Another record in the place of a session's own."""
    with closing(apsw.Connection(str(path))) as db:
        record = read_record(db.execute("SELECT record FROM session").get)
    damage(
        path,
        "UPDATE session SET record = ?",
        msgspec.msgpack.encode(msgspec.structs.replace(record, **changes)),
    )


def test_a_record_that_cannot_be_read_is_named(path: Path) -> None:
    damage(path, "UPDATE session SET record = x'00'")
    report = only(path)
    assert [finding.text for finding in report.violations] == ["the session's record is unreadable"]


@pytest.mark.rule("L7", "S6")
def test_a_request_settled_twice_and_an_answer_to_nobody_are_named(tmp_path: Path) -> None:
    async def repeat(session: Written) -> None:
        await session.ask(1)
        request = session.machine.inbox.open[1]
        await session.answer(1)
        session.machine.inbox.open[1] = request
        await session.answer(1)  # 2
        session.machine.inbox.open[9] = request
        await session.answer(9)  # 3

    report = only(write_log(tmp_path / "log.db", repeat))
    assert found(report) == [("request-resettled", 2, 2), ("request-unknown", 3, 3)]


@pytest.mark.rule("L7", "M6")
def test_an_id_may_be_used_again_once_its_request_is_settled(tmp_path: Path) -> None:
    async def again(session: Written) -> None:
        for _ in range(3):
            await session.ask(1)
            await session.answer(1)
        await session.ask(1)
        await session.cancel(1)
        await session.ask(1)

    report = only(write_log(tmp_path / "log.db", again))
    assert found(report) == []
    assert report.requests == Settled(requests=5, answered=3, cancelled=1, open=1)


@pytest.mark.rule("L7")
def test_a_cancellation_that_came_too_late_settles_nothing(tmp_path: Path) -> None:
    async def late(session: Written) -> None:
        await session.ask(1)
        await session.answer(1)
        await session.cancel(1)
        await session.cancel(7)

    report = only(write_log(tmp_path / "log.db", late))
    assert found(report) == []
    assert report.requests == Settled(requests=1, answered=1)


@pytest.mark.rule("L6", "L7")
def test_a_message_refused_under_its_number_is_no_request_and_its_error_no_stray_answer(
    tmp_path: Path,
) -> None:
    async def refuse(session: Written) -> None:
        await session.send(b'{"jsonrpc":"2.0","id":5,"method":"x","params":{"n":NaN}}')
        await session.ask(6)
        await session.send(b'{"jsonrpc":"2.0","id":6,"method":"x"}')  # a duplicate: no error event
        await session.answer(6)

    path = write_log(tmp_path / "log.db", refuse)
    report = only(path)
    assert found(report) == []
    assert report.requests == Settled(requests=1, answered=1, refused=1)
    damage(path, "DELETE FROM inbox WHERE number = 1")
    damage(path, "UPDATE inbox SET number = number - 1")
    damage(path, "UPDATE session SET received = 2")
    damage(path, "DELETE FROM inbox WHERE number = 2")
    damage(path, "UPDATE session SET received = 1")
    assert found(only(path)) == [("request-unknown", 1, 1)]


@pytest.mark.rule("L7")
def test_a_backends_error_in_words_like_ours_settles_its_request(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.ask(1)
        await session.say({"id": 1, "error": {"code": 1, "message": "", "data": {"reason": "malformed"}}})

    report = only(write_log(tmp_path / "log.db", fill))
    assert found(report) == []
    assert report.requests == Settled(requests=1, answered=1)


@pytest.mark.rule("U7", "S3")
def test_acceptances_one_after_the_other_are_sound(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.upgrade("a", steps=2)
        await session.upgrade("b", steps=1)
        await session.upgrade("c", steps=2)
        await session.upgrade("d", steps=2, bind=False)

    report = only(write_log(tmp_path / "log.db", fill))
    assert found(report) == []
    assert report.state == "upgrade_accepted_pending"


@pytest.mark.rule("U7", "S3")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("nonce", ["b", "a"])
def test_a_second_acceptance_while_one_is_outstanding_is_named(
    tmp_path: Path, steps: int, nonce: str
) -> None:
    async def double(session: Written) -> None:
        await session.upgrade("a", steps=2, bind=False)  # 1
        await session.note(1)
        session.machine.door.state = SessionState.SSE_ACTIVE
        await session.upgrade(nonce, steps=steps)  # 3

    assert found(only(write_log(tmp_path / "log.db", double))) == [("upgrade-doubled", 3, 3)]


@pytest.mark.rule("W3")
def test_an_end_that_is_evicted_or_altered_is_not_taken_for_one_that_never_was(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.note(2)
        await session.end()

    path = write_log(tmp_path / "log.db", fill)
    damage(path, "UPDATE segment SET data = CAST(replace(CAST(data AS TEXT), 'ended', 'evted') AS BLOB)")
    assert found(only(path)) == [("events-altered", 3, 3)]
    damage(path, "DELETE FROM segment")
    damage(path, "UPDATE session SET floor = 3, floor_link = link")
    assert found(only(path)) == []


@pytest.mark.rule("W3", "B1")
def test_what_comes_after_the_end_is_named(tmp_path: Path) -> None:
    async def go_on(session: Written) -> None:
        await session.note(2)
        await session.end()  # 3
        session.machine.append(0, "message", b"{}", 0.0)
        session.machine.append(0, "message", b"{}", 0.0)
        await session.commit()

    assert found(only(write_log(tmp_path / "log.db", go_on))) == [("after-the-end", 4, 5)]


@pytest.mark.rule("W3")
def test_an_end_in_a_session_that_goes_on_is_named(path: Path, tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        await session.end()

    path = write_log(tmp_path / "other.db", fill)
    change(path, state=SessionState.SSE_ACTIVE, reason=None)
    assert found(only(path)) == [("end-early", 1, 1)]


def test_every_session_is_judged_by_itself(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", talk, talk, talk)
    damage(path, "DELETE FROM segment WHERE first = 5 AND session = 2")
    reports = look(path)
    assert [found(report) for report in reports] == [[], [("events-missing", 5, 6)], []]
    for named in (reports[1].session[:6], reports[1].session):
        (report,) = look(path, Story(path).paper, named)  # which are those of another
        assert (report.session, report.receipts) == (reports[1].session, None)
    assert look(path, session="no") == []


def test_a_log_is_read_page_by_page(tmp_path: Path) -> None:
    async def fill(session: Written) -> None:
        for _ in range(40):
            await session.note(1, size=100_000)
        await session.ask(*range(40))

    with snapshot(write_log(tmp_path / "log.db", fill)) as log:
        counted = Counting(log)
        (report,) = asyncio.run(audit(counted))
    assert found(report) == []
    assert counted.largest < 500_000
    assert counted.most < 40


class Counting:
    """A source that remembers how much was asked of it at once."""

    def __init__(self, log: Any) -> None:
        self.sessions = log.sessions
        self._log = log
        self.largest = self.most = 0

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        page, last = await self._log.read(key, after, upto, limit)
        self.largest = max(self.largest, len(page))
        return page, last

    async def entries(self, key: SessionKey, after: int, limit: int) -> Any:
        entries = await self._log.entries(key, after, limit)
        self.most = max(self.most, len(entries))
        return entries


def test_findings_are_bounded_and_counted_all_the_same(tmp_path: Path) -> None:
    async def forget(session: Written) -> None:
        await session.ask(*range(300))
        session.machine.inbox.open.clear()
        await session.end()

    report = only(write_log(tmp_path / "log.db", forget))
    assert (len(report.violations), report.count) == (MOST, 300)


# With receipts ----------------------------------------------------------------------------------------


class Story:
    """A client's receipts of `talk`: over SSE up to 4, over a WebSocket up to 8, and over SSE again."""

    def __init__(self, path: Path) -> None:
        self.ids = ids(path)
        self.paper = Paper()
        self.opened = self.paper.turn(Turn.OPENED, self.ids[0])
        self.sse = self.paper.turn(Turn.SSE_OPENED, self.ids[0])
        self.paper.take(*self.ids[1:5])
        self.handshake = self.paper.turn(Turn.HANDSHAKE, self.ids[4])
        self.websocket = self.paper.turn(Turn.WEBSOCKET_OPENED, self.ids[4])
        self.paper.take(*self.ids[5:9])
        self.dropped = self.paper.turn(Turn.WEBSOCKET_DROPPED, "1006")
        self.again = self.paper.turn(Turn.SSE_OPENED, self.ids[8])
        self.paper.take(*self.ids[9:11])

    def line(self, seq: int) -> int:
        return self.paper.at(self.ids[seq])


@pytest.fixture
def story(path: Path) -> Story:
    return Story(path)


def between(report: Report) -> list[tuple[str | None, str | None]]:
    return [(named(finding.since), named(finding.until)) for finding in report.violations]


def named(turn: Line | None) -> str | None:
    return None if turn is None else f"{turn.what} at {turn.at[11:]}"


@pytest.mark.rule("S1", "C7")
def test_receipts_that_are_a_prefix_of_the_log_prove_continuity(path: Path, story: Story) -> None:
    report = only(path, story.paper)
    assert (found(report), notes(report)) == ([], [])
    assert (report.receipts, report.processed) == (10, 10)
    for _ in range(9):  # any prefix of them does
        story.paper.lines.pop()
        assert found(only(path, story.paper)) == []


@pytest.mark.rule("S1", "C7")
@pytest.mark.parametrize(
    ("removed", "since", "until"),
    [
        ([2, 3], "sse", "handshake"),  # within a connection: up to its next turn
        ([4], "sse", "websocket"),  # across the door
        ([5], "sse", "websocket"),
        ([6], "websocket", "dropped"),
        ([8, 9], "websocket", "again"),  # across a cut
        ([9], "websocket", "again"),
    ],
)
def test_receipts_removed_are_named_with_the_turns_they_lay_between(
    path: Path, story: Story, removed: list[int], since: str, until: str
) -> None:
    for seq in removed:
        del story.paper.lines[story.line(seq)]
    report = only(path, story.paper)
    assert found(report) == [("not-processed", removed[0], removed[-1])]
    assert between(report) == [(getattr(story, since), getattr(story, until))]


@pytest.mark.rule("S1")
def test_what_is_missing_at_the_very_start_has_no_turn_before_it(path: Path, story: Story) -> None:
    del story.paper.lines[story.line(1)]
    report = only(path, story.paper)
    assert (found(report), between(report)) == ([("not-processed", 1, 1)], [(None, story.sse)])
    assert report.violations[0].text == f"event 1: never processed, before `{story.sse}`"


@pytest.mark.rule("S1")
def test_what_is_missing_under_the_last_turn_has_none_after_it(path: Path, story: Story) -> None:
    del story.paper.lines[story.line(8) + 1 :]
    del story.paper.lines[story.line(6)]
    report = only(path, story.paper)
    assert (found(report), between(report)) == ([("not-processed", 6, 6)], [(story.websocket, None)])
    assert report.violations[0].text == f"event 6: never processed, after `{story.websocket}`"


@pytest.mark.rule("S1")
@pytest.mark.parametrize("seq", [1, 6, 10])
def test_a_receipt_doubled_is_named(path: Path, story: Story, seq: int) -> None:
    at = story.line(seq)
    story.paper.lines.insert(at, story.paper.lines[at])
    assert found(only(path, story.paper)) == [("processed-again", seq, seq)]


@pytest.mark.rule("S1")
def test_a_run_of_receipts_doubled_is_one_range(path: Path, story: Story) -> None:
    at = story.line(5)
    story.paper.lines[at + 3 : at + 3] = story.paper.lines[at : at + 3]
    report = only(path, story.paper)
    assert found(report) == [("processed-again", 5, 7)]
    assert between(report) == [(story.websocket, story.dropped)]


@pytest.mark.rule("S1")
@pytest.mark.parametrize("seq", [1, 4, 6, 9])
def test_receipts_swapped_are_out_of_order_and_nothing_is_missing(path: Path, story: Story, seq: int) -> None:
    one, two = story.line(seq), story.line(seq + 1)
    lines = story.paper.lines
    lines[one], lines[two] = lines[two], lines[one]
    assert found(only(path, story.paper)) == [("out-of-order", seq, seq)]


@pytest.mark.rule("S1")
def test_two_holes_are_two_ranges(path: Path, story: Story) -> None:
    for seq in (2, 4):
        del story.paper.lines[story.line(seq)]
    assert found(only(path, story.paper)) == [("not-processed", 2, 2), ("not-processed", 4, 4)]


@pytest.mark.rule("S1")
def test_a_hole_is_filled_bit_by_bit(path: Path, story: Story) -> None:
    lines, at = story.paper.lines, story.line(5)
    five, six, seven, eight = lines[at : at + 4]
    lines[at : at + 4] = [five, eight, seven]
    report = only(path, story.paper)
    assert found(report) == [("not-processed", 6, 6), ("out-of-order", 7, 7)]
    assert between(report) == [(story.websocket, story.dropped)] * 2
    lines[at : at + 3] = [five, eight, six, seven]
    assert found(only(path, story.paper)) == [("out-of-order", 6, 7)]


@pytest.mark.rule("S1")
def test_a_receipt_in_the_middle_of_a_hole_leaves_what_is_on_both_sides_missing(
    path: Path, story: Story
) -> None:
    lines = story.paper.lines
    late = lines[story.line(7)]
    del lines[story.line(6) : story.line(8) + 1]
    lines.insert(story.line(10), late)
    report = only(path, story.paper)
    assert found(report) == [("not-processed", 6, 6), ("not-processed", 8, 8), ("out-of-order", 7, 7)]


@pytest.mark.rule("C3", "S1")
def test_a_receipt_of_another_session_is_foreign_and_its_event_missing(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", talk, talk)
    story = Story(path)
    at = story.line(6)
    story.paper.lines[at] = story.paper.lines[at].replace(story.ids[6], ids(path, TOKEN + "1")[6])
    report, other = look(path, story.paper)
    assert sorted(found(report)) == [("foreign", 6, 6), ("not-processed", 6, 6)]
    assert (found(other), other.receipts) == ([], None)


@pytest.mark.rule("C3", "S1")
def test_a_line_taken_whole_from_another_session_is_laid_to_that_one(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", talk, talk)
    story, other = Story(path), Paper(TOKEN + "1")
    other.take(ids(path, TOKEN + "1")[6])
    story.paper.lines.insert(story.line(6), other.lines[0])
    mine, theirs = look(path, story.paper)
    assert found(mine) == []
    assert found(theirs) == [("not-processed", 1, 5)]


@pytest.mark.rule("C3")
def test_receipts_of_a_log_that_was_made_anew_are_foreign_from_the_start(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", talk)
    story = Story(path)
    damage(path, "UPDATE session SET link = x'0011223344556677', floor_link = x'0011223344556677'")
    damage(path, "DELETE FROM segment")
    damage(path, "UPDATE session SET committed = 0")
    report = only(path, story.paper)
    assert [one for one in found(report) if one[0] == "foreign"] == [("foreign", 0, 10)]


@pytest.mark.rule("C3")
def test_what_a_log_has_lost_is_the_logs_fault_and_not_its_receipts(path: Path, story: Story) -> None:
    damage(path, "DELETE FROM segment WHERE first = 5")
    assert found(only(path, story.paper)) == [("events-missing", 5, 6)]


@pytest.mark.rule("C5", "S2")
def test_receipts_above_the_end_of_the_log_are_foreign(path: Path, story: Story) -> None:
    damage(path, "DELETE FROM segment WHERE first = 8")
    damage(path, "UPDATE session SET committed = 7, link = ?", bytes.fromhex(story.ids[7].split(".")[2]))
    assert found(only(path, story.paper)) == [("foreign", 8, 10)]


@pytest.mark.rule("S1", "C4")
def test_repeats_by_a_new_process_from_its_saved_cursor_on_are_told_and_allowed(
    path: Path, story: Story
) -> None:
    paper = story.paper
    paper.turn(Turn.CONTINUED, story.ids[6])
    paper.turn(Turn.SSE_OPENED, story.ids[6])
    paper.take(*story.ids[7:11])
    report = only(path, paper)
    assert (found(report), notes(report)) == ([], [("seen-again", 7, 10)])
    assert report.processed == 10


@pytest.mark.rule("S1", "C4")
def test_a_new_process_must_go_on_from_its_saved_cursor_without_a_hole(path: Path, story: Story) -> None:
    paper = story.paper
    paper.turn(Turn.CONTINUED, story.ids[4])
    again = paper.turn(Turn.SSE_OPENED, story.ids[4])
    paper.take(*story.ids[6:11])
    report = only(path, paper)
    assert (found(report), between(report)) == ([("not-processed", 5, 5)], [(story.again, again)])


@pytest.mark.rule("S1", "C4")
def test_a_saved_cursor_beyond_the_last_receipt_is_a_hole(path: Path, story: Story) -> None:
    paper = story.paper
    del paper.lines[story.line(6) :]
    paper.turn(Turn.CONTINUED, story.ids[8])
    paper.take(*story.ids[9:11])
    assert found(only(path, paper)) == [("not-processed", 6, 8)]


@pytest.mark.rule("S1", "C3")
def test_receipts_may_begin_at_a_cursor_that_was_saved_and_that_is_told(path: Path) -> None:
    known, paper = ids(path), Paper()
    paper.turn(Turn.CONTINUED, known[4])
    paper.take(*known[5:8])
    report = only(path, paper)
    assert (found(report), notes(report)) == ([], [("begins-late", 5, 5)])
    paper.lines[0] = paper.lines[0].replace(known[4], event_id(known[4], link=Link(b"foreign!")))
    assert ("foreign", 4, 4) in found(only(path, paper))


@pytest.mark.rule("L3", "S1")
def test_evicted_events_are_contiguous_by_number_and_the_floors_link_is_checked(
    path: Path, story: Story
) -> None:
    link = bytes.fromhex(story.ids[6].split(".")[2])
    damage(path, "UPDATE session SET floor = 6, floor_link = ?", link)
    report = only(path, story.paper)
    assert found(report) == []
    assert ("evicted", 1, 5) in notes(report)
    forge(story, 2)
    assert found(only(path, story.paper)) == []
    del story.paper.lines[story.line(3)]
    assert found(only(path, story.paper)) == [("not-processed", 3, 3)]
    forge(story, 6)
    assert ("foreign", 6, 6) in found(only(path, story.paper))


def forge(story: Story, seq: int) -> None:
    """A receipt with another link."""
    at = story.line(seq)
    story.ids[seq] = event_id(story.ids[seq], link=Link(b"foreign!"))
    story.paper.lines[at] = " ".join([*story.paper.lines[at].split(" ")[:2], story.ids[seq]]) + "\n"


def test_a_session_that_the_log_has_forgotten_is_contiguous_by_number(path: Path, story: Story) -> None:
    paper = Paper("another token")
    paper.turn(Turn.OPENED, "0.0.0001020304050607")
    paper.take(*story.ids[1:5])
    _, report = look(path, paper)
    assert (report.logged, found(report), notes(report)) == (False, [], [("not-logged", 1, 4)])
    del paper.lines[2]
    assert found(look(path, paper)[1]) == [("not-processed", 2, 2)]


def test_a_line_that_cannot_be_read_is_told_and_what_it_said_is_missing(path: Path, story: Story) -> None:
    at = story.line(6)
    story.paper.lines[at] = "2026-01-02T10:00:10.000Z torn\n"
    report = only(path, story.paper)
    assert found(report) == [("not-processed", 6, 6)]
    assert notes(report) == [("lines-unreadable", at + 2, at + 2)]


def test_sessions_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", talk, talk)
    one, other = Story(path), Paper(TOKEN + "1")
    other.turn(Turn.OPENED, ids(path, TOKEN + "1")[0])
    other.take(*ids(path, TOKEN + "1")[1:9])
    one.paper.lines = [line for pair in zip(one.paper.lines, other.lines, strict=False) for line in pair]
    reports = look(path, one.paper)
    assert [found(report) for report in reports] == [[], []]
    assert [report.processed for report in reports] == [5, 8]


def test_a_report_is_json(path: Path, story: Story) -> None:
    del story.paper.lines[story.line(9)]
    said = json.loads(json.dumps(only(path, story.paper).as_json()))
    assert said["count"] == 1
    (violation,) = said["violations"]
    assert violation == {
        "kind": "not-processed",
        "rule": "§11.1",
        "of": "event",
        "first": 9,
        "last": 9,
        "detail": None,
        "since": {"turn": "websocket opened", "at": "2026-01-02T10:00:07.000Z", "line": 9},
        "until": {"turn": "sse opened", "at": "2026-01-02T10:00:13.000Z", "line": 15},
        "text": f"event 9: never processed, between `{story.websocket}` and `{story.again}`",
    }
