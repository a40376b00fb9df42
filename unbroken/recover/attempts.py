"""What this launch has opened so far, attempt by attempt: a restart must find again what the attempt before had (I10).

The launcher names a file (UNBROKEN_LAUNCH_FILE), to which the first rank of each attempt adds a line for every run that it opens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from unbroken.core.ports import environment
from unbroken.core.records import MAIN_LINEAGE

MAX_LAUNCH_FILE_BYTES = 1 << 20
"""One line per Run; a longer file is not ours."""

Opened = tuple[int, str]
"""(attempt, folder) of one run that was opened."""


class _Line(Struct, frozen=True):
    directory: str
    attempt: int
    lineage: str = MAIN_LINEAGE


def attempt() -> int:
    """How often the launcher has started these processes again; 0 without a launcher."""
    text = environment("TORCHELASTIC_RESTART_COUNT")
    return int(text) if text.isdigit() else 0


def tell_launcher(directory: str, lineage: str = MAIN_LINEAGE) -> None:
    """The launcher learns where the run lives, so that it can keep the daemon through restarts; a later attempt, that it was opened."""
    path = environment("UNBROKEN_LAUNCH_FILE")
    if path and environment("LOCAL_RANK", "0") == "0":
        with open(path, "ab") as file:
            file.write(msgspec.json.encode(_Line(directory, attempt(), lineage)) + b"\n")


def opened_so_far() -> list[Opened] | None:
    """Every run that this launch has opened, in order; None without our launcher: nobody knows then."""
    path = environment("UNBROKEN_LAUNCH_FILE")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_LAUNCH_FILE_BYTES).splitlines()
    except FileNotFoundError:
        return []
    return [_parsed(line) for line in lines]


def must_find(directory: str, now: int, opened: Sequence[Opened] | None) -> tuple[int, str]:
    """(the restart's number if a run must be in `directory`, else 0; the folder of the attempt before where that is another one, or "").

    A job may open several runs, one after the other (a sweep). One that no attempt before has opened may be new, but only once this
    attempt has found the run that was opened last: else the working directory has changed, and with it what a relative path means.
    """
    if now == 0 or opened is None:
        return now, ""
    before = [folder for number, folder in opened if number < now]
    again = {folder for number, folder in opened if number == now}
    if not before or (directory not in before and before[-1] in again):
        return 0, ""
    return now, "" if directory in before else before[-1]


def _parsed(line: bytes) -> Opened:
    """One line. What is torn counts as a run that the first attempt has opened, nobody knows where."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0, ""
    return found.attempt, found.directory
