"""`unbroken import`: somebody else's checkpoint as a folder of ours."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import JsonOption, console, errors_as_exit_codes, print_json, say, size

_STEP_HELP = "Which step, where SOURCE holds several; else the number it gets where SOURCE tells none."


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file or folder of any known format.", show_default=False)],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help=_STEP_HELP, show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a torch, DCP, safetensors, Hugging Face or Lightning checkpoint into a new folder; nothing in it is executed."""
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import import_checkpoint
        from unbroken.importing.files import printable

        made = import_checkpoint(source, directory, step)
        for note in (*made.notes, *(f"not stored: {text}" for text in made.not_stored)):
            say(printable(note))
        if as_json:
            print_json(made)
            return
        out = console()
        out.print(
            f"{made.format}: {made.num_tensors} tensors, {size(made.size_bytes)}, are in {made.path} as step {made.step}", markup=False
        )
        out.print(f"understood: {', '.join(made.taken) or 'nothing, but all is stored'}", markup=False)
        if made.left_over:
            out.print(f"stored, but not understood: {printable(', '.join(made.left_over))}", markup=False)
