"""The report as one HTML page that needs nothing else: a table, and a timeline for each failed trial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from gapless.torture.reading import sequence_of
from gapless.torture.trial import Trial
from gapless.torture.trials import Result

__all__ = ["page"]

_WIDTH: Final = 1000
_LEFT: Final = 90
_ROW: Final = 18
_EVENTS: Final = 120
"""Height of the plot of the cursor."""


def page(report: dict[str, Any], results: Sequence[Result]) -> str:
    """The page, for a report and the results it was made from."""
    shown = [trial for result in results for trial in result.failures]
    told = {
        (one["name"], failure["seed"]): failure
        for one in report["experiments"]
        for failure in one["failures"]
    }
    body = "".join(_section(trial, told[trial.experiment, trial.seed]) for trial in shown)
    rows = "".join(_row(one) for one in report["experiments"])
    left_out = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in report["left out"].items())
    template = Template(files("gapless.torture").joinpath("page.html").read_text(encoding="utf-8"))
    count = report["violations"]
    return template.substitute(
        target=escape(str(report["target"])),
        verdict="nothing was lost" if not count else f"{count} violations",
        verdict_class="bad" if count else "good",
        rows=rows,
        left_out=f"<p>Left out:</p><ul>{left_out}</ul>" if left_out else "",
        trials=body or "<p>No trial failed, so there is no timeline to show.</p>",
    )


def _row(one: dict[str, Any]) -> str:
    wrong = ", ".join(f"{name} {count}" for name, count in one["violations"].items()) or "none"
    measured = "; ".join(f"{name} {_figures(spread)}" for name, spread in one["measures"].items())
    counted = ", ".join(f"{name} {count:,}" for name, count in one["counts"].items())
    cells = (
        f"<b>{escape(one['name'])}</b><br><small>{escape(one['about'])}</small>",
        f"{one['trials']:,}",
        f"{one['failed trials']:,}",
        f"<span class='{'bad' if one['violations'] else 'good'}'>{escape(wrong)}</span>",
        f"{escape(measured)}<br><small>{escape(counted)}</small>",
        f"{one['seconds']:.0f} s",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _figures(spread: dict[str, float]) -> str:
    return f"{spread['median']:g} (p99 {spread['p99']:g})"


def _section(trial: Trial, failure: dict[str, Any]) -> str:
    found = "".join(
        f"<li><b>{escape(one['violation'])}</b>: {escape(one['detail'])}"
        f"<br><small>{escape(one['meaning'])}</small></li>"
        for one in failure["findings"]
    )
    shrunk = failure["shrunk"]
    lines = "\n".join(f"{entry.at:8.3f}  {entry.lane:<7} {entry.what}" for entry in trial.trace.entries)
    return (
        f"<section><h2>{escape(trial.experiment)}, seed {trial.seed}</h2><ul>{found}</ul>"
        f"<p>schedule <code>{escape(failure['schedule'] or 'none')}</code>"
        + ("" if shrunk is None else f", shrunk to <code>{escape(shrunk or 'none')}</code>")
        + f"<br>again: <code>{escape(failure['again'])}</code></p>"
        f"{_timeline(trial)}"
        f"<details><summary>every moment, in text</summary><pre>{escape(lines)}</pre></details></section>"
    )


def _timeline(trial: Trial) -> str:
    """Bytes, events, the cursor, what the client did and what was done to it, on one axis."""
    trace = trial.trace
    last = max([trial.seconds, *(entry.at for entry in trace.entries)], default=1.0) or 1.0

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * at / last

    parts: list[str] = []
    links = sorted({one.link for one in trace.bytes})
    top = _ROW
    for link in links:
        parts.append(_label(top, f"link {link}"))
        for one in trace.bytes:
            if one.link == link and one.count:
                height = min(_ROW / 2 - 1, 1 + one.count**0.5 / 8)
                y = top - height if one.down else top
                kind, way = ("down", "to the client") if one.down else ("up", "to the server")
                parts.append(
                    f"<rect class='{kind}' x='{x(one.at):.1f}' y='{y:.1f}' width='2' height='{height:.1f}'>"
                    f"<title>{one.at:.3f} s: {one.count} bytes {way}</title></rect>"
                )
        top += _ROW
    top = _lane(
        parts, "client", top, ((e.at, e.what) for e in trace.entries if e.lane in ("client", "wire")), x
    )
    events = [(e.at, sequence_of(e.what.split(" ")[0]), e.what) for e in trace.entries if e.lane == "event"]
    numbers = [number for _, number, _ in events if number is not None]
    lowest, highest = min(numbers, default=0), max(numbers, default=0)
    parts.append(_label(top + _EVENTS / 2, "event"))
    for at, number, what in events:
        y = top + _EVENTS - ((number or lowest) - lowest) / max(1, highest - lowest) * (_EVENTS - 8)
        parts.append(
            f"<circle class='event' cx='{x(at):.1f}' cy='{y:.1f}' r='2'>"
            f"<title>{at:.3f} s: {escape(what)}</title></circle>"
        )
    top += _EVENTS + _ROW
    bottom = top
    for entry in trace.entries:
        if entry.lane == "fault":
            kind = "violation" if entry.what.startswith("VIOLATION") else "fault"
            parts.append(
                f"<line class='{kind}' x1='{x(entry.at):.1f}' x2='{x(entry.at):.1f}' y1='0' y2='{bottom}'>"
                f"<title>{entry.at:.3f} s: {escape(entry.what)}</title></line>"
            )
    for tick in range(6):
        at = last * tick / 5
        parts.append(f"<text class='axis' x='{x(at):.1f}' y='{bottom + _ROW}'>{at:.2f} s</text>")
    return f"<svg viewBox='0 0 {_WIDTH} {bottom + 2 * _ROW:.0f}' role='img'>{''.join(parts)}</svg>"


def _lane(parts: list[str], name: str, top: float, marks: Iterable[tuple[float, str]], x: Any) -> float:
    parts.append(_label(top, name))
    parts.extend(
        f"<rect class='mark' x='{x(at):.1f}' y='{top - 6:.1f}' width='3' height='12'>"
        f"<title>{at:.3f} s: {escape(what)}</title></rect>"
        for at, what in marks
    )
    return top + _ROW


def _label(y: float, text: str) -> str:
    return f"<text class='label' x='4' y='{y + 4:.1f}'>{escape(text)}</text>"
