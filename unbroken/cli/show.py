"""`unbroken show`: what a run is, and what a checkpoint holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.records import MAIN_LINEAGE


def command(
    directory: DirArgument,
    variables: Annotated[bool, typer.Option("--variables", help="List every variable of the checkpoint.")] = False,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint's step; the newest if not given.", show_default=False)] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Show a run's facts and newest checkpoint, or with --variables everything a checkpoint holds."""
    with errors_as_exit_codes(as_json):
        if step is not None and not variables:
            raise ValueError("--step chooses the checkpoint for --variables: give both, or see `unbroken ls` for all checkpoints")
        if variables:
            _show_variables(directory, lineage, step, as_json)
        else:
            _show_overview(directory, lineage, as_json)


def _show_variables(directory: str, lineage: str, step: int | None, as_json: bool) -> None:
    from unbroken.checkpoints import open as open_run

    found = open_run(directory, lineage).variables(step)
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


def _show_overview(directory: str, lineage: str, as_json: bool) -> None:
    from unbroken.checkpoints import open as open_run

    archive = open_run(directory, lineage)
    checkpoints = archive.steps()
    newest = checkpoints[-1] if checkpoints else None
    if as_json:
        print_json({"facts": archive.facts, "num_checkpoints": len(checkpoints), "newest": newest})
        return
    table = Table(box=None, show_header=False)
    table.add_row("run", archive.facts.run_id)
    table.add_row("created", archive.facts.created)
    for name, value in sorted(archive.facts.options.items()):
        table.add_row(name, str(value))
    table.add_row("checkpoints", str(len(checkpoints)))
    if newest is not None:
        table.add_row("newest", f"step {newest.step}, generation {newest.generation}, {size(newest.size_bytes)}, root {newest.root}")
    console().print(table)
