"""The launcher's settings: flag, variable, [launch] of unbroken.toml, default."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.cluster.launch import Command, UsageError, parse
from unbroken.cluster.settings import LAUNCH, PRELOAD


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").touch()
    return tmp_path


def command(*flags: str) -> Command:
    return parse([*flags, "toy.py"], "scratch")


def test_defaults() -> None:
    made = command()
    assert (",".join(made.preload), made.grace_s) == (PRELOAD, 25.0)
    assert (made.options.max_restarts, made.options.same_start) == (100, 3)


def test_flag_before_variable_before_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "unbroken.toml").write_text('[launch]\npreload = ""\nmax_restarts = 0\ngrace_s = 1.5\n')
    made = command()
    assert (made.preload, made.grace_s, made.options.max_restarts, made.options.same_start) == ((), 1.5, 0, None)
    for name, text in (("PRELOAD", "json, csv"), ("MAX_RESTARTS", "7"), ("GRACE_S", "2")):
        monkeypatch.setenv(f"UNBROKEN_{name}", text)
    made = command()
    assert (made.preload, made.grace_s, made.options.max_restarts) == (("json", "csv"), 2.0, 7)
    made = command("--preload", "", "--max-restarts", "1")
    assert (made.preload, made.options.max_restarts) == ((), 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[launch]\ngrace_s = -1\n", "unbroken.toml:2: grace_s = -1: give a number of seconds, 0 or more"),
        ("[launch]\ngrace_s = true\n", "grace_s = True: give a number of seconds"),
        ("[launch]\npreload = 3\n", "unbroken.toml:2: preload = 3: give names of modules in one text"),
        ("[launch]\nmax_restart = 3\n", "[launch] has no 'max_restart': did you mean 'max_restarts'?"),
    ],
)
def test_a_wrong_file_is_a_usage_error(place: Path, text: str, words: str) -> None:
    (place / "unbroken.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        command()
    assert words in str(caught.value)


def test_every_setting_has_words_for_people() -> None:
    assert all(setting.help.endswith(".") and setting.accepts for setting in LAUNCH.settings)
