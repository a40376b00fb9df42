"""`unbroken run`: start a training script like torchrun does, and start it again when a worker dies."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from unbroken.cli.output import errors_as_exit_codes, print_json, say

PASS_EVERYTHING_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""torchrun's own parser reads the arguments, `--help` and `--json` included."""


def command(
    args: Annotated[list[str] | None, typer.Argument(metavar="[torchrun flags] script [args]", show_default=False)] = None,
) -> None:
    """Start a training script like torchrun does, and start it again when a worker dies.

    Takes all of torchrun's flags (`unbroken run --help` lists them) and `--json`, before the script.
    """
    with errors_as_exit_codes(as_json="--json" in (args or [])):
        from unbroken.cluster import start

        outcome, wants_json = start(args or [], say)
    if wants_json:
        print_json(outcome)
    if outcome.exit_code and outcome.failures and outcome.failures[-1].message:
        say(f"the whole error of rank {outcome.failures[-1].rank}:\n{outcome.failures[-1].message}")
    if outcome.exit_code or outcome.end_signal:
        say(outcome.reason + (f" (logs: {outcome.log_dir})" if outcome.exit_code and outcome.log_dir else ""))
    gc.freeze()  # nothing here waits for a destructor, and to take torch apart object by object costs a second of the grace
    raise typer.Exit(outcome.exit_code)
