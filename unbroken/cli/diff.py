"""`unbroken diff`: what differs between two checkpoints, and where two histories part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from unbroken.cli.output import JsonOption, console, errors_as_exit_codes, print_json

if TYPE_CHECKING:
    from unbroken.archive.comparing import Difference
    from unbroken.checkpoints import Diff
    from unbroken.proof.diverging import Parting

_PLACE = "DIR, DIR@STEP, DIR@LINEAGE or DIR@LINEAGE:STEP"


def command(
    a: Annotated[str, typer.Argument(metavar="A", help=f"{_PLACE}; without a step the newest that both hold.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help=_PLACE + ".", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show which variables differ between two checkpoints, and the first step at which the runs part; exit code 1 when anything does."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import parse_place
        from unbroken.checkpoints import open as open_run

        one, two = parse_place(a), parse_place(b)
        found = open_run(one.directory, one.lineage).diff(open_run(two.directory, two.lineage), one.step, two.step)
        if as_json:
            print_json(found)
        else:
            _print(found)
    raise typer.Exit(0 if found.equal else 1)


def _print(found: Diff) -> None:
    console().print(f"step {found.steps[0]} and step {found.steps[1]}: state roots {'equal' if found.state_equal else 'differ'}")
    if found.differences:
        table = Table("variable", "role", "", "A", "B", "elements", "largest difference", "first at", box=None)
        for one in found.differences:
            table.add_row(*map(escape, _row(one)))
        console().print(table)
    for name, step in (("samples", found.journal.samples), ("losses", found.journal.losses), ("roots", found.journal.roots)):
        console().print(_told(name, step, found.journal))
    num = sum(one.counts for one in found.differences)
    console().print("[green]equal[/green]" if found.equal else f"[red]different[/red]: {num} variables")


def _row(one: Difference) -> tuple[str, ...]:
    name = one.name if one.rank is None else f"{one.name} (rank {one.rank})"
    elements = f"{one.num_differing} of {one.num_elements}" if one.num_elements else ""
    far = "" if one.max_abs is None else f"{one.max_abs:g}"
    return name, one.role, one.what, one.before, one.after, elements, far, "" if one.first is None else str(one.first)


def _told(name: str, step: int | None, journal: Parting) -> str:
    if step is None:
        return f"{name}: equal in all {journal.steps} steps that both hold"
    return f"{name}: equal to step {step - 1}, first different at {step}"
