"""The public names are frozen, and importing the package costs nothing."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings

import pytest

import unbroken
from unbroken.core import errors

NAMES = {"Run", "Batches", "Sampler", "keyed", "Store", "open", "import_checkpoint", "Anomalies", "Spike"}
ERRORS = {
    "UnbrokenError",
    "CheckFailed",
    "Damaged",
    "NoCheckpoint",
    "Refused",
    "Fenced",
    "NewerFormat",
    "ForeignFolder",
    "LayoutMismatch",
    "GaveUp",
    "SaveFailed",
    "StoreError",
    "Permanent",
    "Transient",
    "MissingExtra",
}
WARNINGS = {"SaveWarning", "AnomalyWarning", "EnvironmentChanged", "CheckpointWarning"}
PUBLIC = NAMES | ERRORS | WARNINGS | {"StepLost"}
MAX_IMPORT_S = 0.15


def test_the_public_names_are_exactly_these() -> None:
    assert set(unbroken.__all__) == PUBLIC
    assert set(dir(unbroken)) == PUBLIC | {"__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves(name: str) -> None:
    assert callable(getattr(unbroken, name))


def test_what_a_run_offers_is_exactly_this() -> None:
    names = {"close", "completed", "eval", "log", "once", "save", "step", "update"}
    assert {name for name in dir(unbroken.Run) if not name.startswith("_")} == names


def test_what_the_door_for_torchs_checkpoints_offers_is_exactly_this() -> None:
    door = importlib.import_module("unbroken.integrations.dcp")
    assert set(door.__all__) == {"StorageReader", "StorageWriter", "latest"}
    assert {name for name in vars(door.StorageWriter) if not name.startswith("_")} - set(dir(door.TorchStorageWriter)) == {"close"}
    assert list(inspect.signature(door.StorageWriter).parameters) == ["url", "step", "keep", "milestone"]
    assert list(inspect.signature(door.StorageReader).parameters) == ["url", "step", "cast"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runn'"):
        unbroken.Runn  # noqa: B018


def test_error_classes_keep_their_exit_codes() -> None:
    codes = {name: getattr(unbroken, name).exit_code for name in ERRORS - {"MissingExtra"}}
    assert {name for name, code in codes.items() if code == 3} == {"NoCheckpoint"}
    assert {name for name, code in codes.items() if code == 4} == {"Refused", "Fenced", "NewerFormat", "ForeignFolder", "LayoutMismatch"}
    assert {name for name, code in codes.items() if code == 5} == {"GaveUp"}
    assert set(codes.values()) == {1, 3, 4, 5}


def test_warnings_can_be_filtered_by_their_public_names() -> None:
    for kind in (getattr(unbroken, name) for name in WARNINGS):
        with warnings.catch_warnings(), pytest.raises(kind):
            warnings.simplefilter("error", kind)
            warnings.warn("x", kind, stacklevel=1)
        assert issubclass(kind, UserWarning)
    assert issubclass(unbroken.StepLost, RuntimeError)
    assert not issubclass(unbroken.StepLost, unbroken.UnbrokenError)


def test_every_public_error_and_warning_is_drawn_in_the_tree() -> None:
    drawn = re.findall(r"\b[A-Z]\w+\b", errors.__doc__ or "")
    assert PUBLIC - NAMES - {"MissingExtra"} <= set(drawn)


def test_import_loads_no_torch_and_is_fast() -> None:
    script = (
        "import time; t = time.perf_counter(); import unbroken; t = time.perf_counter() - t\n"
        "import sys, json; print(json.dumps([t, sorted(set(sys.modules) & {'torch', 'numpy', 'msgspec', 'blake3', 'rich', 'typer'})]))"
    )
    best_s = 1e9
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
        seconds, heavy = json.loads(done.stdout)
        assert heavy == []
        best_s = min(best_s, seconds)
    assert best_s < MAX_IMPORT_S
