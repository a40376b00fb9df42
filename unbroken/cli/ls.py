"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from unbroken.cli.output import DirArgument, JsonOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.records import MAIN_LINEAGE

if TYPE_CHECKING:
    from unbroken.checkpoints import CheckpointInfo
    from unbroken.proof.replaying import Replayable


def command(
    directory: DirArgument,
    lineage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this history of the folder; all of them if not given.", show_default=False)
    ] = None,
    with_replayable: Annotated[
        bool, typer.Option("--replayable", help="Also the steps between them that `unbroken materialize` can make again.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints that can be loaded, oldest first, those of branches after the run's own."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import chosen_lineage
        from unbroken.checkpoints import open as open_run

        directory, named = chosen_lineage(directory, lineage or MAIN_LINEAGE)
        lineage = named if named != MAIN_LINEAGE else lineage
        archive = open_run(directory) if lineage is None else open_run(directory, lineage)
        there = archive.lineages()
        names = [one.name for one in there] if lineage is None else [lineage]
        trained = [one.name for one in there if one.replay is None and one.name in names]
        found = [one for name in names for one in (archive if name == names[0] else open_run(directory, name)).steps()]
        between = [one for name in trained for one in open_run(directory, name).replayable()] if with_replayable else []
        if as_json:
            print_json([*found, *({"kind": "replayable", **msgspec.to_builtins(one)} for one in between)])
            return
        if not found:
            console().print("no checkpoint yet")
            return
        print(_table(found, with_lineage=len(names) > 1))
        for one in between:
            console().print(_told(one), markup=False)
        console().print(f"{size(archive.stored_bytes())} on disk in all")


def _told(one: Replayable) -> str:
    """Steps between two checkpoints in one line."""
    steps = f"step {one.first}" if one.first == one.last else f"steps {one.first}-{one.last}"
    of = "" if one.lineage == MAIN_LINEAGE else f" of lineage {one.lineage}"
    if one.problem:
        return f"{steps}{of} cannot be made again: {one.problem}"
    roots = f"the state roots of {len(one.roots)} of them are recorded" if one.roots else "their losses alone are recorded"
    return f"{steps}{of} can be made again from {one.base}; {roots}"


def _table(found: list[CheckpointInfo], *, with_lineage: bool) -> str:
    """Columns as wide as they need; laid out here because there may be 10,000 rows, for which rich takes seconds."""
    rows = [("step", "generation", "size", "created", "kind", "root", "lineage")]
    for one in found:
        kind = f"{one.kind}, milestone" if one.milestone else one.kind
        rows.append((str(one.step), str(one.generation), size(one.size_bytes), one.created, kind, one.root[:16], one.lineage))
    columns = list(zip(*rows, strict=True))[: None if with_lineage else -1]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in zip(*columns, strict=True)
    )
