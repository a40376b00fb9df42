"""`unbroken branch`: go on from any checkpoint in another direction, without a copy."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json
from unbroken.core.records import MAIN_LINEAGE


def command(  # noqa: PLR0917  (typer reads the signature)
    directory: DirArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="The checkpoint to go on from.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the new lineage: letters, digits, '.', '_', '-'.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A hyper-parameter to change: lr=1e-4, or 1.lr=1e-4 in group 1.", show_default=False
        ),
    ] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Begin a lineage in the same folder that goes on from a checkpoint; `Run(DIR, lineage=NAME)` trains it. No state is copied."""
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import open as open_run

        made = open_run(directory, lineage).branch(step, name, _pairs(settings or []))
        if as_json:
            print_json(made)
            return
        for change in made.changes:
            console().print(f"changed: {change.pointer}: {change.before} -> {change.after}", markup=False)
        console().print(f'lineage {made.lineage} begins at step {made.step} of {made.parent}: train it with lineage="{made.lineage}"')


def _pairs(settings: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not key or key in found:
            raise ValueError(f"--set {text}: give KEY=VALUE, each key once, such as --set lr=1e-4")
        found[key] = value
    return found
