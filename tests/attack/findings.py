"""What an attack has found: tallies for the table, and what was wrong, by verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

from gapless.protocol.refusal import Reason
from tests.attack.answers import Answer

__all__ = ["VERDICTS", "Findings"]

VERDICTS: Final = {
    "5xx": "no answer is a 5xx, but a 503 that says why",
    "traceback": "no traceback reaches a client or stderr",
    "reason": "every refusal says its reason",
    "hang": "every exchange ends in time",
    "desync": "no answer without its request, none inside another",
    "admission": "nobody is let in without a token",
    "growth": "memory, descriptors, threads and children as before",
    "witnesses": "nothing of the witnesses is lost, repeated or refused",
    "alive": "the server answers afterwards, and stops cleanly",
}
"""What is judged, by name."""

_OPEN: Final = (b"", b"ok", b"ready")
"""What `/healthz` and `/readyz` say, to a HEAD nothing."""
_BEFORE: Final = frozenset(
    {
        *("unauthenticated", "host-forbidden", "origin-forbidden", "not-found", "method-not-allowed"),
        *("malformed", "headers-too-large", "url-too-long", "request-timeout", "limit", "of a HEAD", ""),
    }
)
"""What one without a token may be told: what is wrong before it matters who asks."""
_KEPT: Final = 3
"""Examples of one kind of finding that are kept."""
_REASONS: Final = frozenset(reason.value for reason in Reason)


@dataclass(slots=True)
class Findings:
    """One attack's.

    Attributes:
        guarded: whether the server asks for tokens, which no bad input has.
        inputs: bad inputs, by family.
        answers: by status and reason.
        closes: of WebSockets, by close code; 1006 where there was none.
        connections: that were made.
        wrong: how often each verdict was broken, by what it was that broke it.
        examples: the first of each of those.
    """

    guarded: bool = False
    inputs: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    closes: Counter[int] = field(default_factory=Counter[int])
    connections: int = 0
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    examples: dict[tuple[str, str], list[str]] = field(
        default_factory=lambda: defaultdict[tuple[str, str], list[str]](list)
    )

    @property
    def sent(self) -> int:
        """How many bad inputs were sent."""
        return self.inputs.total()

    def broken(self, verdict: str) -> int:
        """How often a verdict was broken."""
        return sum(count for (name, _), count in self.wrong.items() if name == verdict)

    def find(self, verdict: str, what: str, example: str = "") -> None:
        """Something is wrong."""
        assert verdict in VERDICTS, verdict
        self.wrong[verdict, what] += 1
        examples = self.examples[verdict, what]
        if example and len(examples) < _KEPT:
            examples.append(example)

    def judge(self, answer: Answer, about: str, *, bodiless: bool = False) -> str:
        """One answer, alone: its status, its body; the reason it gives, if it is a refusal.

        Args:
            about: which volley it is of, in words.
            bodiless: whether its request was a HEAD, whose answer has no body to look at.
        """
        reason = ""
        if answer.status >= 400:
            told = answer.refusal()
            given = told.get("reason")
            reason = given if isinstance(given, str) and given in _REASONS else ""
            if "supported" in told:  # M7: the error of a revision that this endpoint does not speak
                reason = "unsupported-version"
            reason = reason or ("of a HEAD" if bodiless else "")
            if not reason:
                self.find(
                    "reason", f"{answer.status} {answer.kind.decode()} {bytes(answer.body[:50])!r}", about
                )
        if answer.status >= 500 and not (answer.status == 503 and reason):
            self.find("5xx", f"{answer.status} {bytes(answer.body[:100])!r}", about)
        if answer.status < 400:
            self.admitted(answer.status, bytes(answer.body), about)
        elif self.guarded and reason not in _BEFORE:
            self.find("admission", f"{answer.status} {reason}, which is nobody's to know", about)
        if b"Traceback (most" in answer.body:
            self.find("traceback", "in an answer", f"{bytes(answer.body[:2000])!r}, in answer to {about}")
        self.answers[answer.status, reason] += 1
        return reason

    def admitted(self, status: int, body: bytes, about: str) -> None:
        """Somebody was not refused: on a guarded server only who asks whether it lives, or is ready."""
        if self.guarded and not (status == 200 and body.strip() in _OPEN):
            self.find("admission", f"{status} {body[:40]!r}", about)
