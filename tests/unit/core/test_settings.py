"""Settings: which of four places counts, what a wrong one is told, and that every value knows where it came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.config import RUN, Interval, Options, RunConfig, configure
from unbroken.core.settings import SettingsFile, find_file, gather, read_file, strange_variables


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "unbroken.toml").write_text(text)
    return folder / "unbroken.toml"


def keep(**options: Any) -> tuple[int, tuple[str, ...]]:
    """The value of one option, and what is told of where values came from."""
    config = configure(None, None, Options(**options))
    return config.keep, config.origins


# -- which place counts --------------------------------------------------------------------------------------------------------


def test_argument_before_environment_before_file_before_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep() == (3, ())
    path = write(place, "# ours\n[run]\nkeep = 4\n")
    assert keep() == (4, (f"keep=4 from {path}:3",))
    monkeypatch.setenv("UNBROKEN_KEEP", "5")
    assert keep() == (5, ("keep=5 from UNBROKEN_KEEP",))
    assert keep(keep=6) == (6, ())
    monkeypatch.setenv("UNBROKEN_KEEP", "")
    assert keep()[0] == 4, "an empty variable is none"


def test_every_option_of_a_run_can_come_from_every_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, tuple[str, str]] = {  # name: as text in a variable, in the file
        "lose_at_most": ("5 min", '"5 min"'), "resume": ("must", '"must"'), "reduce": ("ring", '"ring"'), "total_steps": ("7", "7"),
        "units": ("4", "4"), "seed": ("9", "9"), "threads": ("2", "2"), "keep": ("8", "8"),
    }  # fmt: skip
    expected = RunConfig(
        interval=Interval(seconds=300), resume="must", reduce="ring", total_steps=7, units=4, seed=9, threads=2, keep=8
    )  # fmt: skip
    assert set(told) <= {setting.name for setting in RUN.settings}
    for name, (text, _) in told.items():
        monkeypatch.setenv(f"UNBROKEN_{name.upper()}", text)
    assert configure(None, None, {}) == expected
    for name in told:
        monkeypatch.delenv(f"UNBROKEN_{name.upper()}")
    write(place, "[run]\n" + "\n".join(f"{name} = {value}" for name, (_, value) in told.items()))
    assert configure(None, None, {}) == expected
    assert len(configure(None, None, {}).origins) == len(told)


def test_what_is_given_as_none_is_not_given(place: Path) -> None:
    write(place, '[run]\nunits = 4\nlose_at_most = "9 steps"\nresume = "never"\n')
    config = configure(None, None, {"units": None})
    assert (config.units, config.interval.steps, config.resume) == (4, 9, "never")
    with pytest.raises(ValueError, match="keep=None: give a whole number"):
        configure(None, None, {"keep": None})  # type: ignore[typeddict-item]


def test_the_table_the_typed_options_and_the_config_are_one() -> None:
    names = {setting.name for setting in RUN.settings}
    assert names == set(Options.__annotations__) | {"lose_at_most", "resume"}
    assert names == set(RunConfig.__annotations__) - {"interval", "origins", "replay"} | {"lose_at_most"}
    defaults = configure(None, None, {})
    for setting in RUN.settings:
        if setting.name in Options.__annotations__:
            meant = None if setting.default is None else setting.check(setting.default)
            assert getattr(defaults, setting.name) == meant == getattr(RunConfig(interval=defaults.interval, resume="auto"), setting.name)


# -- which file ----------------------------------------------------------------------------------------------------------------


def test_the_nearest_file_up_to_the_repositorys_root(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = place / "repository" / "jobs" / "today"
    inner.mkdir(parents=True)
    write(place, "[run]\nkeep = 9\n")
    monkeypatch.chdir(inner)
    assert find_file() is None, "outside a repository only the working directory counts"
    (place / "repository" / ".git").mkdir()
    assert find_file() is None, "what lies above the repository is somebody else's"
    outer = write(place / "repository", "[run]\nkeep = 4\n")
    assert find_file() == str(outer)
    nearer = write(place / "repository" / "jobs", "[run]\nkeep = 5\n")
    assert find_file() == str(nearer)
    assert keep()[0] == 5, "the nearest one alone"


def test_a_variable_names_another_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, "[run]\nkeep = 4\n")
    other = write(place / "elsewhere", "[run]\nkeep = 5\n")
    monkeypatch.setenv("UNBROKEN_CONFIG", "elsewhere/unbroken.toml")
    assert keep() == (5, (f"keep=5 from {other}:2",))
    monkeypatch.setenv("UNBROKEN_CONFIG", "gone.toml")
    with pytest.raises(ValueError, match=r"gone\.toml cannot be read: No such file.*UNBROKEN_CONFIG names it: correct or unset it"):
        configure(None, None, {})


def test_a_removed_working_directory_has_no_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = place / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find_file() is None


# -- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\n\nkeep = 0\n", "unbroken.toml:3: keep = 0: give a whole number of at least 1"),
        ("[run]\nkeep = true\n", "unbroken.toml:2: keep = True: give a whole number of at least 1"),
        ('[run]\nlose_at_most = "1 day"\n', """unbroken.toml:2: lose_at_most = '1 day': give a time such as "30s", "5 min", "1h","""),
        ("[run]\nlose_at_most = 30\n", 'unbroken.toml:2: lose_at_most = 30: give a time such as "30s"'),
        ('[run]\nresume = "no"\n', """unbroken.toml:2: resume = 'no': give "auto", "must" or "never\""""),
        ("[run]\nlose_at_mots = 3\n", "unbroken.toml:2: [run] has no 'lose_at_mots': did you mean 'lose_at_most'?"),
        ('[run]\n"keep_" = 3\n', "unbroken.toml:2: [run] has no 'keep_': did you mean 'keep'?"),
        (
            "[run]\nqqqqqq = 3\n",
            "unbroken.toml:2: [run] has no 'qqqqqq': known are anomalies, copy_every, copy_keep, copy_to, full_every, hang_timeout, keep,",
        ),
        ("run.keep_ = 3\n", "unbroken.toml: [run] has no 'keep_': did you mean 'keep'?"),
        ("keep = 3\n", "unbroken.toml:1: 'keep' is not known here: did you mean 'keep' in [run]?"),
        ("qqq = 3\n", "unbroken.toml:1: 'qqq' is not known here: sections are [run], [launch]"),
        ("\n[rum]\nkeep = 3\n", "unbroken.toml:2: 'rum' is not known here: did you mean [run]?"),
        ("run = 3\n", "unbroken.toml:1: 'run' must be a section: write [run]"),
        ("[run]\nkeep = 3\nkeep = 4\n", "unbroken.toml:3: not TOML: Cannot overwrite a value"),
        ("[run]\nkeep = [\n", "not TOML: "),
        ("[run]\n" + "x = " + "[" * 5000 + "]" * 5000, "not TOML: "),
        ("#" * (1 << 20) + "\n", "larger than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_told_by_line_key_and_remedy(place: Path, text: str, words: str) -> None:
    path = write(place, text)
    with pytest.raises(ValueError) as caught:
        configure(None, None, {})
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_a_file_that_is_no_text_is_told_by_line(place: Path) -> None:
    (place / "unbroken.toml").write_bytes(b"[run]\n# fine\nx = \xff\n")
    with pytest.raises(ValueError, match=r"unbroken\.toml:3: not UTF-8"):
        configure(None, None, {})


@pytest.mark.parametrize("kind", ["folder", "dangling"])
def test_what_cannot_be_read_is_not_passed_over(place: Path, kind: str) -> None:
    if kind == "folder":
        (place / "unbroken.toml").mkdir()
    else:
        (place / "unbroken.toml").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"unbroken\.toml cannot be read: "):
        configure(None, None, {})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("KEEP", "0", "UNBROKEN_KEEP is '0': give a whole number of at least 1"),
        ("KEEP", "many", "UNBROKEN_KEEP is 'many': give a whole number"),
        ("KEEP", "3.0", "UNBROKEN_KEEP is '3.0': give a whole number"),
        ("KEEP", "9" * 5000, "give a whole number"),
        ("THREADS", "4096", "UNBROKEN_THREADS is '4096': at most 1024 per rank"),
        ("LOSE_AT_MOST", "soon", "UNBROKEN_LOSE_AT_MOST is 'soon': give a time such as"),
        ("RESUME", "MUST", """UNBROKEN_RESUME is 'MUST': give "auto", "must" or "never\""""),
    ],
)
def test_a_wrong_variable_is_told_with_what_is_accepted(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str
) -> None:
    monkeypatch.setenv(f"UNBROKEN_{name}", text)
    with pytest.raises(ValueError) as caught:
        configure(None, None, {})
    assert words in str(caught.value)


def test_a_wrong_argument_is_told_with_the_nearest_name(place: Path) -> None:
    with pytest.raises(TypeError, match=r"Run\(\) got unknown options \['total_step'\]; known are .*did you mean 'total_steps'"):
        configure(None, None, {"total_step": 3})  # type: ignore[typeddict-unknown-key]


def test_variables_that_nobody_reads_are_found() -> None:
    names = dict.fromkeys(["UNBROKEN_KEEP", "UNBROKEN_KEEEP", "UNBROKEN_QQQQQQQQQQ", "UNBROKEN_LAUNCH_FILE", "HOME"], "x")
    assert strange_variables(names, RUN) == {"UNBROKEN_KEEEP": "UNBROKEN_KEEP", "UNBROKEN_QQQQQQQQQQ": ""}


@given(st.text(max_size=80), st.sampled_from(["", "[run]\n", "[run]\nkeep = "]))
def test_no_text_is_more_than_refused(text: str, head: str) -> None:
    path = f"/tmp/unbroken-settings-{os.getpid()}.toml"
    try:
        with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(head + text)
        found = gather(RUN, {}, read_file(path))
        assert set(found) == set(RUN.names)
    except ValueError as error:
        assert str(error).startswith(path)
    finally:
        os.unlink(path)


def test_the_line_of_a_key_is_that_of_its_own_section() -> None:
    file = SettingsFile("f", "keep=1\n[ launch ]\n keep = 2\n['run']\n\n'keep' = 3\n[[x]]\n", {})
    assert [file.place(section, "keep") for section in ("", "launch", "run", "x")] == ["f:1", "f:3", "f:6", "f"]
    assert file.place("run") == "f:4"
