"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

from rich.table import Table

from unbroken.cli.output import DirArgument, JsonOption, console, errors_as_exit_codes, print_json, size


def command(directory: DirArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints that can be loaded, oldest first."""
    with errors_as_exit_codes(as_json):
        from unbroken.checkpoints import open as open_run

        found = open_run(directory).steps()
        if as_json:
            print_json(found)
            return
        table = Table("step", "generation", "size", "created", "kind", "root", box=None)
        for one in found:
            kind = f"{one.kind}, milestone" if one.milestone else one.kind
            table.add_row(str(one.step), str(one.generation), size(one.size_bytes), one.created, kind, one.root[:16])
        console().print(table if found else "no checkpoint yet")
