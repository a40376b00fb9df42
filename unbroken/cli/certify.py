"""`unbroken certify`: prove that a run was unbroken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json
from unbroken.core.records import MAIN_LINEAGE

if TYPE_CHECKING:
    from unbroken.proof.certify import Certificate

FACTS = (
    "steps",
    "final_step",
    "final_root",
    "generations",
    "world_sizes",
    "steps_lost_total",
    "num_checkpoints",
    "num_skipped",
    "num_rollbacks",
    "fell_back",
    "samples_exactly_once",
    "losses_equal",
    "state_root_equal",
    "superseded_equal",
)


def command(
    directory: DirArgument,
    against: Annotated[
        str | None, typer.Option(metavar="DIR", help="An uninterrupted run to compare with, step by step.", show_default=False)
    ] = None,
    lineage: LineageOption = MAIN_LINEAGE,
    against_lineage: Annotated[str, typer.Option(metavar="NAME", help="Which history of the reference.")] = MAIN_LINEAGE,
    as_json: JsonOption = False,
) -> None:
    """Prove from stored bytes that every step and every sample happened once; exit code 1 when it cannot be proven."""
    with errors_as_exit_codes(as_json):
        from unbroken.archive.places import chosen_lineage
        from unbroken.checkpoints import open as open_run

        certificate = open_run(*chosen_lineage(directory, lineage)).certify(against, against_lineage)
        if as_json:
            print_json(certificate)
        else:
            _print(certificate)
    raise typer.Exit(0 if certificate.certified else 1)


def _print(certificate: Certificate) -> None:
    table = Table(box=None, show_header=False)
    for name in FACTS:
        value = getattr(certificate, name)
        table.add_row(name.replace("_", " "), "not checked" if value is None else str(value))
    console().print(table)
    for branched in certificate.branches:
        console().print(f"lineage {branched.lineage}: from {branched.parent} at step {branched.step}, generation {branched.generation}")
        for change in branched.changes:
            console().print(f"  changed on purpose: {change.pointer}: {change.before} -> {change.after}", markup=False)
    for step in certificate.skipped:
        console().print(f"skipped: step {step.step}: {step.reason}")
    for one in certificate.condemned:
        console().print(f"condemned: step {one.step} of generation {one.generation}: {one.reason}")
    for difference in certificate.differences:
        console().print(f"[yellow]limits the claim[/yellow]: {difference}")
    for problem in certificate.problems:
        console().print(f"[red]problem[/red]: {problem}")
    console().print(f"[green]certified[/green], grade {certificate.grade}" if certificate.certified else "[red]not certified[/red]")
