"""The daemon's part in a start: a plan, another one where its source is bad, and before either what only the copy of the run has."""

from __future__ import annotations

from collections.abc import Callable

from unbroken.core.messages import Bad, Begin
from unbroken.daemon.board import Board
from unbroken.daemon.errands import Errands
from unbroken.daemon.folder import RunFolder
from unbroken.daemon.plan import Key
from unbroken.daemon.returning import Found, bring_back, mend
from unbroken.shm.server import Client


class Starts:
    """Answers rank 0. What takes long is done by `errands`; `say` writes one line of the daemon's log."""

    def __init__(self, folder: RunFolder, board: Board, errands: Errands, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._board = board
        self._errands = errands
        self._say = say
        self._tried: set[Key] = set()

    def begin(self, client: Client, message: Begin) -> None:
        """Where to start; a newer checkpoint that only the copy has is brought back first."""
        if self._folder.changed():
            self._say("the run folder was removed or replaced: what memory holds of it is forgotten")
            self._board.forget()
        self._tried.clear()
        if not self._folder.looks_at_copy(message):
            self._plan(client, message)
            return
        url = message.rules.copy_to
        self._errands.ask(client, message, lambda: bring_back(self._folder, url), self._brought)

    def bad(self, client: Client, message: Bad) -> None:
        """Where else to start; a checkpoint on disk is repaired from the copy, if that can be done, before it is given up."""
        choice = self._folder.planned()
        is_planned = choice is not None and (choice.step, choice.generation) == (message.step, message.stored_generation)
        if choice is not None and is_planned and choice.cut is not None:
            self._board.drop(choice.cut)
        url, commit = self._folder.rules.copy_to, choice.commit if choice is not None else None
        if choice is None or not is_planned or commit is None or not url or choice.key in self._tried:
            client.send(self._folder.bad(message, self._board.cuts()))
            return
        self._tried.add(choice.key)
        self._errands.ask(client, message, lambda: mend(self._folder, url, commit), self._mended)

    def _plan(self, client: Client, message: Begin) -> None:
        plan = self._folder.begin(message, self._board.cuts(), witnessed=self._board.witnessed, last_applied=self._board.last_applied)
        self._board.witnessed |= message.restart_count == 0
        client.send(plan)

    def _brought(self, client: Client, message: Begin, found: Found) -> None:
        for note in found.notes:
            self._say(note)
        self._folder.tell(found.notes, found.lacking)
        self._plan(client, message)

    def _mended(self, client: Client, message: Bad, found: Found) -> None:
        self._say(" ".join(found.notes) or found.lacking)
        text = " ".join(found.notes) or found.lacking
        client.send(self._folder.bad(message, self._board.cuts(), note=text, is_repaired=bool(found.notes)))
