"""`unbroken logs`: bring a sink of metrics up to date, or make it anew, from the journals of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import DirArgument, JsonOption, LineageOption, console, errors_as_exit_codes, print_json
from unbroken.core.records import MAIN_LINEAGE

SinkOption = Annotated[
    str, typer.Option(metavar="SINK", help="jsonl, jsonl:FILE, tensorboard:DIR, wandb:PROJECT, mlflow:URI or swanlab:PROJECT.")
]


def command(directory: DirArgument, to: SinkOption = "jsonl", lineage: LineageOption = MAIN_LINEAGE, as_json: JsonOption = False) -> None:
    """Give a sink the committed steps that it lacks; one that is empty or new gets all of them."""
    with errors_as_exit_codes(as_json):
        from unbroken.loggers.choose import targets
        from unbroken.loggers.feed import complete
        from unbroken.store.tiers.disk import local_path

        (target,) = targets(to)
        before, now = complete(target, local_path(directory), lineage)
        if as_json:
            print_json({"sink": str(target), "held": before, "written": now - before, "holds": now})
        else:
            console().print(f"{target}: held steps up to {before}, {now - before} written, holds steps up to {now}")
