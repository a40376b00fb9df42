"""`unbroken doctor`: is this host, and a run folder's place, fit for a run; and which options are in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from unbroken.cli.output import JsonOption, console, errors_as_exit_codes, print_json
from unbroken.core.ports import SystemClock, whole_environment

if TYPE_CHECKING:
    from unbroken.doctor.examine import Report

STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def command(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR]",
            help="A run folder, existing or to be made, or a place in an object store such as s3://bucket/run.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[bool, typer.Option("--config", help="Show every option's value and where it comes from instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this host and a run folder's place, or a place in an object store alone; exit code 1 when a run could not work there."""
    with errors_as_exit_codes(as_json):
        if config and directory is not None:
            raise ValueError("--config shows options, which no folder changes: leave DIR out")
        if config:
            _show_options(as_json)
            return
        from unbroken.cluster.settings import preload_in_force
        from unbroken.doctor.examine import examine
        from unbroken.doctor.place import examine_place
        from unbroken.store.tiers.choose import is_object
        from unbroken.store.tiers.disk import local_path

        if directory is not None and is_object(directory):
            report = examine_place(directory, SystemClock())
        else:
            report = examine(local_path(directory) if directory is not None else None, preload_in_force(), SystemClock())
        if as_json:
            print_json(report)
        else:
            _print(report)
    raise typer.Exit(0 if report.ok else 1)


def _print(report: Report) -> None:
    table = Table(box=None, show_header=False)
    for one in report.findings:
        remedy = f"\n[{STYLES[one.status]}]→ {escape(one.remedy)}[/]" if one.remedy else ""
        table.add_row(f"[{STYLES[one.status]}]{one.status}[/]", escape(one.name), escape(one.seen) + remedy)
    console().print(table)


def _show_options(as_json: bool) -> None:
    from unbroken.config import options_in_force

    found = options_in_force(whole_environment())
    if as_json:
        print_json(found)
        return
    table = Table("section", "option", "value", "from", box=None)
    for one in found.options:
        table.add_row(one.section, one.name, escape(str(one.value)), escape(one.origin))
    console().print(table)
    console().print(escape(f"file: {found.file or 'none'}"))
    for name, near in found.strange_variables.items():
        console().print(escape(f"nothing reads {name}{f': did you mean {near}?' if near else ''}"))
