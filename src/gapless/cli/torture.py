"""`gapless torture`: faults on the wire, and whether a server's sessions survive them."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gapless.cli.loop import loop_factory
from gapless.cli.output import err, examples, interactive, out, print_json, print_table, say, table
from gapless.errors import UsageError

if TYPE_CHECKING:
    from gapless.cli.target import Aim
    from gapless.torture.schedule import Schedule
    from gapless.torture.trial import Experiment, Target, Trial
    from gapless.torture.trials import Result

__all__ = ["TORTURE_EXAMPLES", "torture"]

TORTURE_EXAMPLES: Final = examples(
    "gapless torture http://127.0.0.1:8000/mcp --trials 50",
    "gapless torture --app server:mcp -e resume --html report.html",
    "gapless torture -e storm --seconds 60 -- python server.py",
    "gapless torture http://127.0.0.1:8000/mcp -e resume --seed 17 --trials 1 --schedule '12:reset'",
)

_COMMAND_TRIALS: Final = 50
"""Trials of an experiment against a stdio server, which is started anew for each session."""
_NOT_OURS: Final = "it kills the server, and one that we did not start is not ours to kill"
_CROWDS: Final = frozenset({"crowd"})
"""Experiments with hundreds of sessions: unless named they are spared a command, which each would start."""
_SHRUNK: Final = 5
"""Failed trials of an experiment that are shrunk: the first ones."""
_SAID_EVERY: Final = 500
"""Trials between lines of progress where there is no terminal."""


def torture(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL | -- CMD",
            show_default=False,
            help="A server that runs, or a stdio server's command: Gapless serves that for as long.",
        ),
    ] = None,
    *,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="<module:attr>", help="A server of the Python SDK; Gapless serves it for as long."
        ),
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option(
            "--experiment",
            "-e",
            metavar="<name>",
            help="resume, migration, failover, boundary, crowd, storm or kill; repeat it for several. "
            "[dim]\\[default: all that the server's protocol allows][/dim]",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="How many trials of each. [dim]\\[default: its own][/dim]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Begin no trial of an experiment after so long.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first trial's seed; the next ones count on.")] = 0,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="<steps>", help="These faults in place of the seed's: '12:reset 30:swallow'."),
    ] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Look for the shortest schedules that still fail.")
    ] = True,
    jobs: Annotated[int | None, typer.Option(min=1, help="How many trials at once.")] = None,
    pid: Annotated[
        int | None, typer.Option(help="The process of a running server, to watch its memory.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Write a page with a timeline of each failed trial.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Break a server's connections in every way, and count what is lost.

    The server offers the tools ladder and runs, which emit numbered events.

    A proxy on this machine cuts, delays and swallows them, by each trial's seed; kill kills the server.

    A failed trial is repeated with fewer faults, and printed as a command.

    The exit status is 1 if anything was lost, and 2 if the server cannot be judged.
    """
    from gapless.cli.target import aim
    from gapless.torture.experiments import EXPERIMENTS
    from gapless.torture.experiments.kill import Kill
    from gapless.torture.schedule import parse_schedule

    known = (*EXPERIMENTS, Kill.name)
    unknown = sorted(set(experiment or ()) - set(known))
    if unknown:
        raise UsageError(f"there is no experiment {unknown[0]!r}", hint=f"there are {', '.join(known)}")
    aiming = aim(target or [], app)
    kills = not experiment or Kill.name in experiment
    if aiming.url is not None and experiment and kills:
        raise UsageError(f"{Kill.name}: {_NOT_OURS}", hint="name it by --app, or by its command after --")
    if aiming.command and trials is None:
        trials = _COMMAND_TRIALS
        say(f"{trials} trials of each, for the command is started for every session; --trials sets another")
    chosen = [EXPERIMENTS[name] for name in EXPERIMENTS if not experiment or name in experiment]
    run = _Run(
        aiming,
        chosen,
        bool(experiment),
        kills,
        trials,
        seconds,
        seed,
        None if schedule is None else parse_schedule(schedule),
        jobs,
        pid,
        shrink,
    )
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            results, left_out = runner.run(run.run())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    _tell(run, results, left_out, html, as_json)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the command."""

    target: Aim
    chosen: Sequence[type[Experiment]]
    named: bool
    """Whether the experiments were named, so that one that cannot be run is an error."""
    kills: bool
    """Whether the server is to be killed as well."""
    trials: int | None
    seconds: float | None
    seed: int
    schedule: Schedule | None
    jobs: int | None
    pid: int | None
    shrink: bool

    async def run(self) -> tuple[list[Result], dict[str, str]]:
        """Every experiment that the target can take, each on a server of its own if it is ours."""
        from gapless.cli.target import aimed
        from gapless.torture.trials import discover

        # A server that is ours is ended with us, and not by Ctrl-C alone.
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        results: list[Result] = []
        left_out: dict[str, str] = {}
        for kind in self.chosen:
            if kind.name in _CROWDS and self.target.command and not self.named:
                left_out[kind.name] = "it would start the command hundreds of times; -e includes it"
                continue
            async with aimed(self.target, kind.serve) as (url, pid):
                target = await discover(url, pid or self.pid)
                if not kind.views & target.views:
                    why = f"the server has no {next(iter(kind.views)).value} view"
                    if self.named:
                        raise UsageError(f"{kind.name}: {why}", hint="leave the experiment out")
                    left_out[kind.name] = why
                    continue
                results.append(await self._experiment(kind, target))
        if self.kills and self.target.url is not None:
            left_out["kill"] = _NOT_OURS
        elif self.kills:
            results.append(await self._kill())
        return results, left_out

    async def _kill(self) -> Result:
        from gapless.cli.target import mortal
        from gapless.torture.experiments.kill import Kill

        count = self.trials if self.trials is not None else Kill.trials
        async with mortal(self.target, Kill.serve) as server:
            with _progress(Kill.name, count, "kills") as step:
                seeds = range(self.seed, self.seed + count)
                result = await Kill().run(server, iter(seeds), seconds=self.seconds, done=step)
            server.kept = bool(result.failed)
        if server.kept:
            say(f"{Kill.name}: the log, the receipts and the journal are kept in {server.folder}")
        return result

    async def _experiment(self, kind: type[Experiment], target: Target) -> Result:
        from gapless.torture.trials import run_experiment, shrink

        count = self.trials if self.trials is not None else kind.trials
        seeds = itertools.count(self.seed)
        with _progress(kind.name, count) as step:
            result = await run_experiment(
                kind,
                target,
                itertools.islice(seeds, count),
                jobs=self.jobs,
                seconds=self.seconds,
                schedule=self.schedule,
                done=step,
            )
        failures = [failure for failure in result.failures[: _SHRUNK * self.shrink] if failure.schedule]
        if failures:
            seeds_of = ", ".join(str(failure.seed) for failure in failures)
            say(f"{kind.name}: looking for the shortest schedules that fail, of seeds {seeds_of}")
        shrunk = await asyncio.gather(*(shrink(kind, target, failure) for failure in failures))
        for failure, shorter in zip(failures, shrunk, strict=True):
            if shorter is not None:
                result.shrunk[failure.seed] = shorter
        return result


@contextmanager
def _progress(name: str, count: int, what: str = "trials") -> Generator[Callable[[Trial], None]]:
    """A bar on a terminal, a line now and then elsewhere; yields what is to be called with each trial."""
    failed = 0
    done = 0

    def words() -> str:
        return f"{name}: {failed} failed" if failed else name

    if not interactive():

        def say_step(trial: Trial) -> None:
            nonlocal failed, done
            failed, done = failed + trial.failed, done + 1
            if done % _SAID_EVERY == 0 or done == count:
                say(f"{words()}, {done:,} of {count:,} {what}")

        yield say_step
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(name, total=count)

        def step(trial: Trial) -> None:
            nonlocal failed
            failed += trial.failed
            progress.update(task, advance=1, description=words())

        yield step


def _tell(
    run: _Run, results: list[Result], left_out: dict[str, str], html: Path | None, as_json: bool
) -> None:
    """Print what came of it; the exit status says whether anything was lost."""
    from gapless.torture.page import page
    from gapless.torture.report import report

    told = report(str(run.target), run.target.words, results, left_out)
    if as_json:
        print_json(told)
    else:
        _print(told)
    if html is not None:
        try:
            html.write_text(page(told, results), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {html}: {error.strerror}") from None
        say(f"the page is {html}")
    if told["violations"]:
        raise typer.Exit(1)


def _print(told: dict[str, Any]) -> None:
    made = table("experiment", "trials", "failed", "violations", "time", right=("trials", "failed", "time"))
    for one in told["experiments"]:
        wrong = ", ".join(f"{name} {count:,}" for name, count in one["violations"].items())
        made.add_row(
            one["name"],
            f"{one['trials']:,}",
            f"{one['failed trials']:,}",
            f"[red]{escape(wrong)}[/red]" if wrong else "[green]none[/green]",
            f"{one['seconds']:.0f} s",
        )
    print_table(made)
    measures = table(
        "experiment", "measured", "median", "p99", "most", "of", right=("median", "p99", "most", "of")
    )
    for one in told["experiments"]:
        for name, spread in one["measures"].items():
            unit = "" if "(" in name else " ms"
            figures = [f"{spread[key]:,.1f}{unit}" for key in ("median", "p99", "most")]
            measures.add_row(one["name"], escape(name), *figures, f"{spread['count']:,}")
        for name, count in one["counts"].items():
            measures.add_row(one["name"], escape(name), "", "", "", f"{count:,}")
    out.print()
    print_table(measures)
    for name, why in told["left out"].items():
        say(f"{name} is left out: {why}")
    for one in told["experiments"]:
        for failure in one["failures"]:
            _print_failure(one["name"], failure)
    count = told["violations"]
    out.print()
    out.print(
        "[bold green]nothing was lost[/bold green]"
        if not count
        else f"[bold red]{count:,} violations[/bold red]"
    )


def _print_failure(name: str, failure: dict[str, Any]) -> None:
    out.print(f"\n[bold]{name}, seed {failure['seed']}[/bold]  {escape(failure['schedule'])}")
    for found in failure["findings"]:
        out.print(f"  [red]{escape(found['violation'])}[/red]: {escape(found['detail'])}")
        out.print(f"    [dim]{escape(found['meaning'])}[/dim]")
    out.print(f"  again: {escape(failure['again'])}", soft_wrap=True)
