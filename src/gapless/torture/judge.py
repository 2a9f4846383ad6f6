"""Compares what arrived with what was emitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gapless.torture.door import DoorSession
from gapless.torture.ladder import Account, Kind, ranges
from gapless.torture.trial import Trial, Violation

__all__ = ["judge", "judge_door", "judge_outcome", "judge_rest", "judge_runs", "judge_stream"]


def judge_door(trial: Trial, session: DoorSession, account: Account, *, excused: bool = False) -> None:
    """Note what is wrong with a climb in the session view, whose event IDs leave no doubt."""
    skipped = session.skipped
    if skipped:
        words = ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in skipped)
        told = f"events {words} were skipped on either transport; no error was raised"
        trial.find(Violation.MISSING, told, sum(high - low + 1 for low, high in skipped))
    if session.again:
        told = f"events {ranges(session.again)} came again after they had been processed"
        trial.find(Violation.REPEATED, told, len(session.again))
    judge(trial, account, excused=excused or bool(skipped), repeats=not session.again)


def judge(trial: Trial, account: Account, *, excused: bool = False, repeats: bool = True) -> None:
    """Note what is wrong with one climb.

    Args:
        excused: the client was told, out loud, that it cannot have the rest, or it is noted already:
            what is missing is no violation then, but a repeat still is.
        repeats: whether repeats are looked for; they may be noted already.
    """
    trial.counts["events"] += len(account.rungs)
    if not excused:
        for violation, rungs in (
            (Violation.MISSING, account.missing if account.result is not None else []),
            (Violation.UNANSWERED, [] if account.answered else [0]),
        ):
            if rungs:
                trial.find(violation, _detail(account, rungs, violation), len(rungs))
    for violation, rungs in (
        (Violation.REPEATED, account.repeated if repeats else []),
        (Violation.REORDERED, account.reordered),
    ):
        if rungs:
            trial.find(violation, _detail(account, rungs, violation), len(rungs))


def judge_outcome(trial: Trial, account: Account, runs: int | None, *, several: bool = False) -> None:
    """Note what is wrong with a call of a server that may die, once it is answered or has waited long enough.

    With a result: it ran once, and every rung came before. With `outcome-unknown`: what came of it is
    a beginning, without a hole.

    Args:
        runs: how often it has been begun; `None` if nobody knows.
        several: there are several streams, and a call's own is sure to bring its progress only.
    """
    due = [rung for rung in range(1, account.climb.rungs + 1) if not several or _own(account, rung)]
    if account.answered:
        trial.counts["calls answered"] += 1
        if runs == 0:
            told = f"call {account.id} is answered, and climb {account.climb.run} was never begun"
            trial.find(Violation.NOT_RUN, told)
    elif account.outcome_unknown:
        trial.counts["calls outcome-unknown"] += 1
        due = [rung for rung in due if rung < max(account.rungs, default=0)]
    else:
        trial.find(Violation.UNANSWERED, _detail(account, [0], Violation.UNANSWERED))
        return
    came = set(account.rungs[: account.before])
    _find(trial, account, Violation.MISSING, [rung for rung in due if rung not in came])


def judge_rest(trial: Trial, account: Account, runs: int | None, *, several: bool = False) -> None:
    """Note what only time can tell of a call: repeats, a second run, what came too late or on no stream.

    Args:
        runs, several: as for `judge_outcome`.
    """
    if runs is not None and runs > 1:
        trial.find(Violation.RUN_TWICE, f"climb {account.climb.run} was begun {runs} times")
    if several and account.answered:
        missing = [rung for rung in account.missing if not _own(account, rung)]
        _find(trial, account, Violation.MISSING, missing)
    _find(trial, account, Violation.REPEATED, account.repeated)
    _find(trial, account, Violation.REORDERED, account.reordered)
    _find(trial, account, Violation.REORDERED, account.late, " after the answer")


def _own(account: Account, rung: int) -> bool:
    return account.climb.kind(rung) is Kind.PROGRESS


def _find(trial: Trial, account: Account, violation: Violation, rungs: list[int], words: str = "") -> None:
    if rungs:
        told = f"call {account.id}: {_detail(account, rungs, violation)}{words}"
        trial.find(violation, told, len(rungs))


def judge_stream(trial: Trial, name: str, given: Sequence[str], logged: Sequence[str]) -> None:
    """Note what is wrong with the event IDs that were received on a stream, which the log has whole.

    Args:
        name: of the stream, in words.
    """
    at = {id: index for index, id in enumerate(logged)}
    seen = set(given)
    again = len(given) - len(seen)
    if again:
        trial.find(Violation.REPEATED, f"{name}: {again} events came again", again)
    unknown = [id for id in given if id not in at]
    if unknown:
        told = f"{name}: events were received that the log does not have: {', '.join(unknown[:3])}"
        trial.find(Violation.LOG_BROKEN, told, len(unknown))
    known = [at[id] for id in dict.fromkeys(given) if id in at]
    late = [logged[index] for before, index in pairwise(known) if index < before]
    if late:
        trial.find(
            Violation.REORDERED, f"{name}: events {', '.join(late[:3])} came after later ones", len(late)
        )
    missing = [id for id in logged if id not in seen]
    if missing:
        told = f"{name}: {len(missing)} of {len(logged)} events never came, the first of them {missing[0]}"
        trial.find(Violation.MISSING, told, len(missing))


def judge_runs(trial: Trial, run: str, answer: dict[str, Any]) -> None:
    """Note it if a climb was begun more than once; the answer is that of the tool `runs`."""
    try:
        count = int(answer["result"]["content"][0]["text"])
    except (KeyError, IndexError, TypeError, ValueError):
        return
    trial.counts["runs checked"] += 1
    if count > 1:
        trial.find(Violation.RUN_TWICE, f"climb {run} was begun {count} times")


def _detail(account: Account, rungs: list[int], violation: Violation) -> str:
    of = f"of {account.climb.rungs}"
    if violation is Violation.UNANSWERED:
        if account.result is None:
            return f"call {account.id}: no answer; {len(set(account.rungs))} {of} rungs came"
        return f"call {account.id} is answered {str(account.result)[:200]}"
    climbed = [rung for rung in rungs if rung]
    kinds = ", ".join(sorted({account.climb.kind(rung).value for rung in climbed}))
    told = [f"rungs {ranges(climbed)} {of} ({kinds})"] if climbed else []
    return " and ".join(told + ["a second answer"] * (0 in rungs))
