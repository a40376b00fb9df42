"""`unbroken materialize`: make a checkpoint again that is not stored, and prove that it is the one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, say
from unbroken.core.records import MAIN_LINEAGE

if TYPE_CHECKING:
    from unbroken.materializing import Materialized


def command(  # noqa: PLR0917  (typer reads the signature)
    directory: DirArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="The step to make again.", show_default=False)],
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT [ARGS]", help="The training script of the run, as `unbroken run` takes it.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Of the lineage that it is made in: replay-STEP.", show_default=False)
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Workers; as many as before if not given.", show_default=False)
    ] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Compute a checkpoint again, from the stored one before it by the run's own script, and prove it; exit code 1 where it differs.

    It becomes a milestone in a lineage of its own; the run itself is not touched. What was killed goes on when it is started again.
    """
    with errors_as_exit_codes(as_json):
        from unbroken.materializing import materialize

        made = materialize(directory, step, script or [], say, lineage=lineage, name=name, num_ranks=num_ranks)
        if as_json:
            print_json(made)
        else:
            _print(made)
    raise typer.Exit(made.exit_code)


def _print(made: Materialized) -> None:
    where = f"step {made.step}"
    if made.outcome == "stored":
        console().print(f"{where} is stored in lineage {made.lineage}: nothing to make, root {made.root[:16]}")
        return
    for text in made.differences:
        console().print(f"[yellow]not as before[/yellow]: {escape(text)}")
    if made.outcome == "parted":
        console().print(f"[red]not the same[/red]: {escape(made.reason)}")
    elif made.outcome == "unfinished":
        console().print(f"[red]not made[/red]: {escape(made.reason)}")
    elif made.proof is not None:
        by = "the recorded state root" if made.proof.by_root else "the recorded losses; no root of this step is recorded"
        before = "had been made before" if made.outcome == "there" else "is made"
        console().print(f"{where} {before}, as milestone of lineage {made.lineage}, from step {made.base}, root {made.root[:16]}")
        console().print(f"[green]proven[/green] by {by}: {made.proof.steps} steps and {made.proof.roots} roots are equal")
