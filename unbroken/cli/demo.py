"""`unbroken demo`: train, kill, continue, prove."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from unbroken.cli.output import JsonOption, console, errors_as_exit_codes, print_json, say
from unbroken.core.ports import SystemClock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from unbroken.demo.narrator import Told

STYLES = {"save": "dim", "strike": "red", "bad": "red", "start": "cyan", "good": "green"}
SIGNS = {"save": "·", "strike": "✕", "bad": "!", "start": "▶", "good": "✓"}


def command(
    directory: Annotated[str, typer.Option("--dir", metavar="DIR", help="Where to write; must be empty or missing.")] = "demo-run",
    seed: Annotated[int, typer.Option(min=0, help="Of the data, the model and the moments of the faults.")] = 0,
    ranks: Annotated[int, typer.Option(min=2, max=4, help="Training processes.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Train a small GPT, kill it again and again, and prove that the result has the same bits as without faults."""
    with errors_as_exit_codes(as_json):
        from unbroken.demo.main import run_demo

        if as_json:
            result = run_demo(directory, seed, ranks, _say)
            print_json(result)
        else:
            people = console()
            with people.status("") as status:
                result = run_demo(directory, seed, ranks, _show(people, status))
    raise typer.Exit(0 if result.certified else 1)


def _say(told: Told) -> None:
    if told.kind != "progress":
        say(told.text)


def _show(people: Console, status: Status) -> Callable[[Told], None]:
    """Lines with the time since the start; where training stands, below them, if this is a terminal."""
    clock = SystemClock()
    begin_s = clock.monotonic()

    def show(told: Told) -> None:
        if told.kind == "progress":
            status.update(f"[dim]{escape(told.text)}[/dim]")
            return
        if told.kind in ("act", "strike"):
            status.update("[dim]…[/dim]")
        elapsed_s = int(clock.monotonic() - begin_s)
        clock_time = f"[dim]{elapsed_s // 60}:{elapsed_s % 60:02d}[/dim]"
        if told.kind == "act":
            people.print(f"\n{clock_time} [bold]{escape(told.text)}[/bold]")
        else:
            sign, style = SIGNS.get(told.kind, " "), STYLES.get(told.kind, "default")
            people.print(f"{clock_time}  [{style}]{sign} {escape(told.text)}[/{style}]")

    return show
