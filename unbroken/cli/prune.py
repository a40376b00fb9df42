"""`unbroken prune`: remove the checkpoints that no rule keeps, and what dead writers left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.records import MAIN_LINEAGE

if TYPE_CHECKING:
    from unbroken.archive.pruning import Pruning


def command(  # noqa: PLR0917  (typer reads the signature)
    directory: DirArgument,
    keep: Annotated[int | None, typer.Option(metavar="N", help="The newest N.", show_default=False)] = None,
    keep_every: Annotated[
        str | None, typer.Option(metavar="STEPS", help='The first at or after each multiple: "1000 steps".', show_default=False)
    ] = None,
    keep_hours: Annotated[
        int | None, typer.Option(metavar="H", help="One per hour, for the newest H hours that have one.", show_default=False)
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help='The best by a logged metric: val_loss, or "accuracy max 3".', show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Remove the checkpoints that no rule keeps, and what dead writers left, with the reason for each.

    Without a rule those of the run's newest start apply; with one, --keep is 3 if it is not given. The newest checkpoint, milestones and
    what branches need stay in any case. Refused while a run or Store is writing.
    """
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import open as open_run

        made = open_run(directory, lineage).prune(
            keep=keep, keep_every=keep_every, keep_hours=keep_hours, keep_best=keep_best, dry_run=dry_run
        )
        if as_json:
            print_json(made)
        else:
            _print(made)


def _print(made: Pruning) -> None:
    table = Table("step", "generation", "size", "", "why", box=None)
    rows = [(one, "stays") for one in made.stays] + [(one, "would go" if made.dry_run else "went") for one in made.goes]
    for one, fate in sorted(rows, key=lambda row: (row[0].step, row[0].generation)):
        table.add_row(str(one.step), str(one.generation), size(one.size_bytes), fate, escape("; ".join(one.reasons)))
    console().print(table)
    console().print(f"kept: {made.rules}", markup=False)
    would = "would be freed" if made.dry_run else "freed"
    console().print(
        f"{size(made.freed_bytes)} {would}: {made.num_files} files, {made.num_leftovers} of which dead writers have left", markup=False
    )
