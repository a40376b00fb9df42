"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, console, errors_as_exit_codes, print_json, size

if TYPE_CHECKING:
    from unbroken.checkpoints import CheckpointInfo


def command(
    directory: DirArgument,
    lineage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this history of the folder; all of them if not given.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints that can be loaded, oldest first, those of branches after the run's own."""
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import open as open_run

        archive = open_run(directory) if lineage is None else open_run(directory, lineage)
        names = [one.name for one in archive.lineages()] if lineage is None else [lineage]
        found = [one for name in names for one in open_run(directory, name).steps()]
        if as_json:
            print_json(found)
            return
        if not found:
            console().print("no checkpoint yet")
            return
        console().print(_table(found, with_lineage=len(names) > 1))
        console().print(f"{size(archive.stored_bytes())} on disk in all")


def _table(found: list[CheckpointInfo], *, with_lineage: bool) -> Table:
    table = Table("step", "generation", "size", "created", "kind", "root", *(["lineage"] if with_lineage else []), box=None)
    for one in found:
        kind = f"{one.kind}, milestone" if one.milestone else one.kind
        row = [str(one.step), str(one.generation), size(one.size_bytes), one.created, kind, one.root[:16]]
        table.add_row(*row, *([one.lineage] if with_lineage else []))
    return table
