"""Does a checkpoint fit the live objects? Everything is compared before anything is touched, and one error lists every difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from unbroken.capture.flatten import Item
from unbroken.capture.rebuild import Pieces, rebuild
from unbroken.capture.restore import differences
from unbroken.core.errors import LayoutMismatch
from unbroken.core.records import Piece


class Fit:
    """Differences found so far. Live objects are given by key, a lone one under ""; their stored pieces lie below a place."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._wrong: list[str] = []

    def tensors(self, items: Iterable[Item], lazy: Set[str] = frozenset()) -> None:
        """Parameters and buffers: name, shape and type of each but those that are made anew (`lazy`)."""
        kinds = ("parameter", "frozen", "buffer", "nan_buffer")
        live = {i.piece.pointer: i.piece for i in items if i.piece.kind in kinds and i.piece.pointer not in lazy}
        stored = {p: piece for p, (piece, _) in self._pieces.items() if piece.kind in kinds and p not in lazy}
        self._missing += sorted(live.keys() - stored.keys())
        self._unexpected += sorted(stored.keys() - live.keys())
        self._wrong += [
            f"{p}: stored {_form(stored[p])}, live {_form(live[p])}"
            for p in sorted(live.keys() & stored.keys())
            if _form(stored[p]) != _form(live[p]) and "alias" not in (stored[p].dtype, live[p].dtype)
        ]

    def fillable(self, place: str, live: Any) -> None:
        """What the forms of tensors do not tell: one tensor for two stored values, or one that cannot be written."""
        if not (self._missing or self._unexpected or self._wrong):
            self._wrong += [f"{place[1:]}.{text}" for text in differences(self._pieces, live, pointer=place).mismatched]

    def optimizers(self, live: Mapping[str, list[dict[str, Any]]]) -> None:
        """Parameter groups with their members by name, and the options of each."""
        place = "/optimizer/groups"
        stored = rebuild(self._pieces, place) if place in self._pieces else {}
        table = stored if isinstance(stored, dict) else {"": stored}
        for key in self._common(place, table, live):
            self._missing += [p for p in (f"/optimizer/state{_tail(key)}",) if p not in self._pieces]
            self._groups(place + _tail(key), table[key], live[key])

    def objects(self, place: str, live: Mapping[str, Any]) -> None:
        """Objects with a state_dict: which there are, and what each has in its state."""
        stored = rebuild(self._pieces, place) if place in self._pieces else {}
        alone = "" in live or not (live and isinstance(stored, dict))
        table = ({"": stored} if place in self._pieces else {}) if alone else stored
        for key in self._common(place, table, live):
            before, now = table[key], live[key].state_dict()
            if isinstance(before, dict) and isinstance(now, dict):
                self._missing += [f"{place}{_tail(key)}/{name}" for name in now if name not in before]
                if type(live[key]).__module__.startswith("torch."):  # another's state may have grown while it ran
                    self._unexpected += [f"{place}{_tail(key)}/{name}" for name in before if name not in now]

    def names(self, place: str, live: Mapping[str, Any]) -> None:
        """Which objects have state here; what it holds is their own business."""
        stored = rebuild(self._pieces, place) if place in self._pieces else {}
        self._common(place, stored, live)

    def values(self, place: str, live: Any) -> None:
        """Any nested state, {} for none."""
        if bool(live) == (place in self._pieces):
            found = differences(self._pieces, live, pointer=place) if live else None
            for mine, theirs in ((self._missing, "missing"), (self._unexpected, "unexpected"), (self._wrong, "mismatched")):
                mine += [f"{place[1:]}.{text}" for text in getattr(found, theirs, ())]
        else:
            there = live if live else rebuild(self._pieces, place)
            (self._missing if live else self._unexpected).extend(f"{place[1:]}.{name}" for name in there)

    def require(self) -> None:
        """LayoutMismatch if there is any difference."""
        if not (self._missing or self._unexpected or self._wrong):
            return
        lines = [f"missing in the checkpoint: {p}" for p in self._missing]
        lines += [f"not in the live state: {p}" for p in self._unexpected]
        raise LayoutMismatch(
            "the checkpoint does not fit the live objects, which are untouched:\n  " + "\n  ".join(lines + self._wrong),
            tuple(self._missing),
            tuple(self._unexpected),
            tuple(self._wrong),
        )

    def _common(self, place: str, stored: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
        """Keys that both sides have; the others are noted."""
        self._missing += [place + _tail(key) for key in live if key not in stored]
        self._unexpected += [place + _tail(key) for key in stored if key not in live]
        return [key for key in live if key in stored]

    def _groups(self, place: str, stored: Any, live: list[dict[str, Any]]) -> None:
        if not isinstance(stored, list) or len(stored) != len(live):
            self._wrong.append(f"{place}: stored {len(stored)} parameter groups, live {len(live)}")
            return
        for i, (a, b) in enumerate(zip(stored, live, strict=True)):
            for what, before, now in (("parameters", a["params"], b["params"]), ("options", a, b)):
                gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
                if gone or new:
                    self._wrong.append(f"{place}/{i}: stored group has {what} {gone or 'none'} more, live group has {new or 'none'} more")


def _tail(key: str) -> str:
    return f"/{key}" if key else ""


def _form(piece: Piece) -> str:
    return f"{piece.dtype}{list(piece.shape)}"
