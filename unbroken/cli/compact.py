"""`unbroken compact`: files hold again mostly what checkpoints need."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.records import MAIN_LINEAGE


def command(
    directory: DirArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Store again what is needed of files that are mostly not, and shorten chains of differences where that frees space.

    Worth it after `unbroken prune` where checkpoints are stored as differences or share much. No checkpoint goes and none of its bits
    changes. Refused while a run or Store is writing.
    """
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import open as open_run

        made = open_run(directory, lineage).compact(dry_run=dry_run)
        if as_json:
            print_json(made)
            return
        if not made.num_packs:
            console().print("nothing to do: no file is mostly unneeded")
            return
        about = "would be stored again" if dry_run else "are stored again"
        steps = ", ".join(map(str, made.steps)) or "none"
        console().print(f"{about}: {made.num_chunks} chunks as they were and {made.num_whole} whole; checkpoints concerned: {steps}")
        freed = "about " + size(made.freed_bytes) + " would be freed" if dry_run else size(made.freed_bytes) + " freed"
        console().print(f"{made.num_packs} packs, {size(made.written_bytes)} written, {freed}")
