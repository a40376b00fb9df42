"""`unbroken export`: a checkpoint as files that other tools read."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, say
from unbroken.core.records import MAIN_LINEAGE


def command(  # noqa: PLR0917  (typer reads the signature)
    directory: DirArgument,
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="A new folder (safetensors) or a new file (torch).", show_default=False)],
    format_: Annotated[str, typer.Option("--format", metavar="safetensors|torch", help="What to write.")] = "safetensors",
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint's step; the newest if not given.", show_default=False)] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as safetensors and JSON, or as one file for torch.load(weights_only=True); nothing is overwritten."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import chosen
        from unbroken.checkpoints import open as open_run

        place = chosen(directory, lineage, step)
        made = open_run(place.directory, place.lineage).export(to, place.step, format_)
        for note in made.notes:
            say(note)
        if as_json:
            print_json(made)
        else:
            console().print(f"step {made.step} is in {made.path}: {', '.join(made.files)}", markup=False)
