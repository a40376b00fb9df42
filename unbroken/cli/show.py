"""`unbroken show`: what a run is, and what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.errors import NoCheckpoint
from unbroken.core.records import MAIN_LINEAGE

if TYPE_CHECKING:
    from unbroken.checkpoints import Archive


def command(
    directory: DirArgument,
    variables: Annotated[bool, typer.Option("--variables", help="List every variable of the checkpoint.")] = False,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint's step; the newest if not given.", show_default=False)] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Show a run's facts and one checkpoint (the newest, DIR@STEP or --step), or with --variables everything that it holds."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import chosen
        from unbroken.checkpoints import open as open_run

        place = chosen(directory, lineage, step)
        archive = open_run(place.directory, place.lineage)
        if variables:
            _show_variables(archive, place.step, as_json)
        else:
            _show_overview(archive, place.step, as_json)


def _show_variables(archive: Archive, step: int | None, as_json: bool) -> None:
    found = archive.variables(step)
    if as_json:
        print_json({"num_variables": len(found), "variables": found})
        return
    table = Table("name", "layer", "kind", "role", "scope", "size", "hash", "captured", box=None)
    for one in found:
        row = (
            one["name"],
            one["layer"],
            one["kind"],
            one["role"],
            one["scope"],
            size(one["size_bytes"]),
            one["hash"][:16],
            one["captured"],
        )
        table.add_row(*row)
    console().print(table)
    console().print(f"{len(found)} variables")


def _show_overview(archive: Archive, step: int | None, as_json: bool) -> None:
    checkpoints = archive.steps()
    newest = checkpoints[-1] if checkpoints else None
    one = newest if step is None else next((found for found in checkpoints if found.step == step), None)
    if one is None and step is not None:
        raise NoCheckpoint(f"no checkpoint of step {step}: see `unbroken ls` for those there are")
    if as_json:
        print_json({"facts": archive.facts, "num_checkpoints": len(checkpoints), "newest" if step is None else "checkpoint": one})
        return
    table = Table(box=None, show_header=False)
    table.add_row("run", archive.facts.run_id)
    table.add_row("created", archive.facts.created)
    for name, value in sorted(archive.facts.options.items()):
        table.add_row(name, str(value))
    table.add_row("checkpoints", str(len(checkpoints)))
    if one is not None:
        name = "newest" if step is None else "checkpoint"
        table.add_row(name, f"step {one.step}, generation {one.generation}, {size(one.size_bytes)}, {one.kind}, root {one.root}")
    console().print(table)
