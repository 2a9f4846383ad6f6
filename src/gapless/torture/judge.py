"""Compares what arrived with what was emitted."""

from __future__ import annotations

from typing import Any

from gapless.torture.door import DoorSession
from gapless.torture.ladder import Account, ranges
from gapless.torture.trial import Trial, Violation

__all__ = ["judge", "judge_door", "judge_runs"]


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
