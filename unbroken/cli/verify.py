"""`unbroken verify`: recompute every digest from stored bytes."""

from __future__ import annotations

import typer

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json
from unbroken.core.records import MAIN_LINEAGE


def command(directory: DirArgument, lineage: LineageOption = MAIN_LINEAGE, as_json: JsonOption = False) -> None:
    """Read everything the run's checkpoints need and check every digest; exit code 1 when something is wrong."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import chosen_lineage
        from unbroken.checkpoints import open as open_run

        report = open_run(*chosen_lineage(directory, lineage)).verify()
        if as_json:
            print_json(report)
        else:
            for path, reason in report.bad:
                console().print(f"[red]bad[/red] {path}: {reason}")
            for step, generation, reason in report.condemned:
                console().print(f"condemned: step {step} of generation {generation}: {reason}")
            verdict = "[green]all good[/green]" if report.ok else "[red]damaged[/red]"
            console().print(f"{verdict}: {report.num_checkpoints} checkpoints, {report.num_chunks} chunks")
    raise typer.Exit(0 if report.ok else 1)
