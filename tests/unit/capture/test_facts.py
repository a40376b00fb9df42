"""Facts about the place of a computation: nothing secret, everything that changes bits, and plain values that can be stored (I13)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.rigs.step_rank import CPU, raw
from unbroken.capture import facts
from unbroken.capture.tree import flatten, rebuild


def test_versions_are_those_of_what_computes() -> None:
    found = facts.versions()
    assert (found["torch"], found["numpy"]) == (torch.__version__, numpy.__version__)
    assert found["python"].count(".") == 2
    assert "absent" not in found.values()
    assert all(isinstance(value, str) and value for value in found.values())


def test_a_package_that_is_not_there_is_a_fact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_PACKAGES", ("torch", "no-such-package"))
    assert facts.versions()["no-such-package"] == "absent"


@pytest.fixture
def restored() -> Iterator[None]:
    kept = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(kept[0])
    torch.set_default_dtype(kept[1])
    torch.set_float32_matmul_precision(kept[2])
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    torch.autograd.set_detect_anomaly(False)
    torch.backends.cuda.enable_math_sdp(True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("default_dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("deterministic_algorithms", lambda: torch.use_deterministic_algorithms(True)),
        ("deterministic_warn_only", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("float32_matmul_precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("flush_denormal", lambda: torch.set_flush_denormal(True)),
        ("mkldnn_enabled", lambda: setattr(torch.backends.mkldnn, "enabled", False)),
        ("anomaly_mode", lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
        ("math_attention", lambda: torch.backends.cuda.enable_math_sdp(False)),
    ],
)
def test_I13_a_switch_that_is_turned_shows(restored: None, name: str, change: Callable[[], Any]) -> None:
    before = facts.kernel_settings(CPU)
    change()
    after = facts.kernel_settings(CPU)
    assert before[name] != after[name]
    assert {key for key in before if before[key] != after[key]} <= {name, "deterministic_algorithms"}


def test_autocast_shows_while_it_is_on() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        inside = facts.kernel_settings(CPU)
    assert (inside["autocast"], inside["autocast_dtype"]) == (True, "torch.float16")
    assert facts.kernel_settings(CPU)["autocast"] is False


def test_only_listed_variables_are_ever_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "secret")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    found = facts.variables()
    assert (found["MKL_CBWR"], found["ONEDNN_MAX_CPU_ISA"]) == ("COMPATIBLE", "")
    assert "secret" not in str([found, facts.hardware(CPU), facts.topology(0, 1, 0), facts.versions()])


def test_topology_is_read_from_whatever_launched_us(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = facts.topology(0, 1, 4)
    assert (alone["local_rank"], alone["local_world_size"], alone["node"], alone["launcher"]) == (0, 1, 0, "plain")
    assert (alone["generation"], alone["backend"], alone["host"]) == (4, "none", os.uname().nodename)
    for name, value in {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    found = facts.topology(6, 8, 0)
    assert (found["rank"], found["world_size"], found["local_rank"], found["local_world_size"], found["node"]) == (6, 8, 2, 4, 1)
    assert found["launcher"] == "elastic"


def test_all_facts_can_be_stored_and_come_back_equal() -> None:
    sheet = {"v": facts.versions(), "k": facts.kernel_settings(CPU), "e": facts.variables(), "h": facts.hardware(CPU)}
    items = flatten(sheet, "/environment")
    assert rebuild({item.piece.pointer: (item.piece, raw(item)) for item in items}, "/environment") == sheet


def test_the_machine_is_named() -> None:
    found = facts.hardware(CPU)
    assert found["processor"] and found["machine"] == os.uname().machine
    assert found["device_name"] == "cpu"
