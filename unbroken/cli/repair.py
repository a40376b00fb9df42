"""`unbroken repair`: damaged and missing objects of a run, put back from a copy of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json, size
from unbroken.core.records import MAIN_LINEAGE


def command(
    directory: DirArgument,
    source: Annotated[
        str, typer.Option("--from", metavar="URL", help="A copy of the run: s3://bucket/run or a folder.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done; nothing is written.")] = False,
    lineage: LineageOption = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Replace damaged or missing packs and manifests by verified ones of the same name; exit code 1 when something stays bad."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.repairing import repair_place

        report = repair_place(directory, source, lineage, dry_run=dry_run)
        if as_json:
            print_json(report)
        else:
            done = "would be repaired" if dry_run else "repaired"
            for fault in report.faults:
                verdict = f"[red]cannot be repaired[/red]: {escape(fault.why)}" if fault.why else f"[green]{done}[/green]"
                console().print(f"{escape(fault.path)}: {escape(fault.reason)}: {verdict}")
            named = {fault.path for fault in report.faults}
            for path, reason in report.bad:
                if path not in named:
                    console().print(f"{escape(path)}: {escape(reason)}: [red]cannot be repaired[/red]")
            verdict = "[green]all good[/green]" if report.ok else "[red]damaged[/red]"
            console().print(f"{verdict}: {len(report.faults)} objects were bad, {size(report.written_bytes)} written")
    raise typer.Exit(0 if report.ok else 1)
