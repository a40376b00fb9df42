"""The documents fit the code: what they name exists, and what they quote is said."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import typer.main

import unbroken
from tests.rigs.stranger import Broken, Folder
from unbroken.capture import flatten, generators, scalars, tensors
from unbroken.cli.app import app
from unbroken.config import Options
from unbroken.core import errors, records
from unbroken.store import paths
from unbroken.store.log import LOG_SUMMARY_EVERY

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GOLDENS = [ROOT / "tests" / "golden" / name / "run" for name in ("v1", "v1b", "v2")]
GOLDEN = GOLDENS[1]
NONCE = "0123456789abcdef" * 2


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str = "") -> list[str]:
    """Fenced code blocks of one language."""
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if found == language]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row but headings' rulers."""
    for line in re.findall(r"^\|(.*)\|$", text, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if not all(re.fullmatch(r"-*", cell) for cell in cells):
            yield cells


def words(text: str) -> list[str]:
    """What stands in `backticks`."""
    return re.findall(r"`([^`\n]+)`", text)


def sources(folder: str) -> list[str]:
    """Every Python file of a folder."""
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def names_of_tests() -> str:
    """The names of all tests, one string."""
    return " ".join(name for source in sources("tests") for name in re.findall(r"def (test_\w+)", source))


@cache
def said() -> str:
    """Every text in the code, with a mark where a value is put in, and between texts."""
    found: list[str] = []
    for source in sources("unbroken"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


# -- links -------------------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """A heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        name, _, place = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name}: {target} leads nowhere"
        if place:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert place in map(anchor, headings), f"{document.name}: {target} names no heading"


# -- README ------------------------------------------------------------------------------------------------------------------


def parameters(function: object) -> set[str]:
    found = set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    return found | set(Options.__annotations__) if "options" in found else found


def test_the_ten_lines_compile_and_use_what_exists() -> None:
    (code,) = blocks(text_of("README.md"), "python")
    tree = ast.parse(code)
    assert len([line for line in code.splitlines() if line and not line.startswith("import")]) <= 10
    calls = {
        "unbroken.Run": unbroken.Run,
        "unbroken.Batches": unbroken.Batches,
        "run.step": unbroken.Run.step,
        "micro.backward": __import__("unbroken.step.micro").step.micro.Micro.backward,
    }
    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
            name = ast.unparse(node.func)
            seen.add(name)
            unknown = {keyword.arg for keyword in node.keywords} - parameters(calls[name])
            assert not unknown, f"{name} has no {unknown}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "micro":
            assert hasattr(__import__("unbroken.step.micro").step.micro.Micro, node.attr)
    assert seen == set(calls)


def commands() -> dict[str, set[str]]:
    """Every command and its options."""
    group = typer.main.get_command(app)
    return {name: {o for p in command.params for o in p.opts} for name, command in group.commands.items()}  # type: ignore[attr-defined]


def test_every_command_of_the_readme_exists_and_every_command_is_there() -> None:
    text = text_of("README.md")
    lines = [line for block in blocks(text) for line in block.splitlines()]
    known, used = commands(), set()
    for line in lines:
        if match := re.match(r"unbroken (\w+)", line):
            used.add(match[1])
            unknown = set(re.findall(r"--[a-z-]+", line)) - known[match[1]]
            assert match[1] == "run" or not unknown, f"{line}: {unknown}"  # run takes torchrun's flags
    assert used <= known.keys()
    assert all(re.search(rf"\b{name}\b", "".join(lines)) for name in known)


def test_every_make_verb_of_the_readme_exists() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text_of("README.md"))) <= verbs


def exit_codes() -> set[int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UnbrokenError)]
    return {0, 2} | {kind.exit_code for kind in kinds}


@pytest.mark.parametrize("name", ["README.md", "docs/failure-modes.md", "docs/guarantees.md", "docs/format.md"])
def test_exit_codes_are_those_of_the_errors(name: str) -> None:
    assert {int(code) for code in re.findall(r"[Ee]xit code (\d+)", text_of(name))} <= exit_codes()


def test_the_table_of_exit_codes_is_whole() -> None:
    text = text_of("docs/failure-modes.md").partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {cells[0]: words(cells[1]) for cells in rows(text)}
    assert {int(code) for code in listed if code.isdigit()} == exit_codes()
    assert {name for named in listed.values() for name in named} <= commands().keys()


# -- architecture ------------------------------------------------------------------------------------------------------------


def test_every_path_of_the_architecture_exists() -> None:
    for word in words(text_of("docs/architecture.md")):
        if re.fullmatch(r"[\w./]+(/|\.py|\.md|\.json)", word) and word not in ("run.json",):
            places = (ROOT, ROOT / "unbroken", ROOT / "unbroken" / "core")
            assert any((place / word).exists() for place in places), f"{word} does not exist"


def test_the_rooms_of_the_architecture_are_the_layers_that_the_linter_keeps() -> None:
    section = text_of("docs/architecture.md").partition("## Rooms")[2].partition("\n## ")[0]
    listed = [{word.strip("/").removesuffix(".py") for word in words(cells[0])} for cells in rows(section) if words(cells[0])]
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    kept = [{name.removeprefix("unbroken.") for name in layer.split(" | ")} for layer in reversed(layers)]
    assert [*listed, {"__main__"}] == kept
    package = ROOT / "unbroken"
    there = {path.parent.name for path in package.glob("*/__init__.py")} | {path.stem for path in package.glob("[!_]*.py")}
    assert there == set().union(*listed)


def test_every_invariant_stands_in_a_tests_name() -> None:
    numbers = [cells[0] for cells in rows(text_of("docs/architecture.md")) if re.fullmatch(r"I\d+", cells[0])]
    assert len(numbers) >= 13
    lacking = [number for number in numbers if not re.search(rf"_{number}_", names_of_tests())]
    assert not lacking


def test_every_case_a_guarantee_names_stands_in_a_tests_name() -> None:
    named = set(re.findall(r"\b(B\d\d|I\d+)\b(?! is not covered)", text_of("docs/guarantees.md"))) - {"I1"}
    lacking = sorted(name for name in named if not re.search(rf"_{name}[a-z]?_", names_of_tests()))
    assert len(named) > 20
    assert not lacking


# -- format ------------------------------------------------------------------------------------------------------------------


def layout() -> list[str]:
    """The folder's paths as the page writes them, with values put in."""
    values = {"lineage": "main", "n": 7, "generation": 3, "step": 30, "node": 0, "nonce": NONCE}

    def put(match: re.Match[str]) -> str:
        name, _, how = match[1].partition(", ")
        value = values[name]
        if how.startswith("first"):
            return str(value)[: int(how.split()[1])]
        return f"{value:0{how.split()[0]}d}" if how else str(value)

    return [re.sub(r"<([^>]+)>", put, line) for line in blocks(text_of("docs/format.md"))[0].splitlines()]


def test_the_folder_of_the_page_is_that_of_the_code() -> None:
    assert layout() == [
        paths.RUN,
        paths.WRITER,
        paths.log_entry("main", 7),
        paths.journal("main", 3),
        paths.manifest(30, 3, NONCE, 0),
        paths.pack(NONCE),
    ]


def stored_records() -> dict[str, tuple[str, ...]]:
    """Every record that a file may hold, from the two that all others hang on."""
    found: dict[str, tuple[str, ...]] = {}
    waiting: list[object] = [records.RunFacts, records.LogEntry, records.Manifest, *records.Record.__args__]
    while waiting:
        kind = waiting.pop()
        waiting += getattr(kind, "__args__", ())
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
            found[kind.__name__] = kind.__struct_fields__
            waiting += inspect.get_annotations(kind, eval_str=True).values()
    return found


def test_the_records_of_the_page_have_exactly_the_fields_of_the_code() -> None:
    named = {words(cells[0])[0]: tuple(words(cells[1].partition(" (")[0])) for cells in rows(text_of("docs/format.md")) if words(cells[0])}
    known = stored_records()
    assert {name: fields for name, fields in named.items() if name in known} == known
    assert {name for name in named if name.endswith(("Entry", "Record", "Ref"))} <= known.keys()


def test_the_types_of_pieces_on_the_page_are_those_of_the_code() -> None:
    page = set(words(text_of("docs/format.md").partition("## Pieces")[2].partition("## Order")[0]))
    known = {*flatten.DICTS.values(), *flatten.LISTS.values(), *flatten.SETS.values(), flatten.DEQUE, flatten.OBJECT, flatten.ALIAS}
    known |= {*scalars._DECODE, *generators.BY_NAME, *tensors.NAMED}
    assert known <= page
    assert {word for word in page if word.startswith("py:")} <= known


def test_numbers_on_the_page_are_those_of_the_code() -> None:
    page = text_of("docs/format.md")
    assert f"Every {LOG_SUMMARY_EVERY}th entry" in page
    for number in ("64 MiB", "32 MiB", "4 MiB", "256 MiB", "64 KiB", "1 MiB", "4,096", "2^20", "1,024"):
        assert number in page


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.parent.name)
def test_a_reader_written_from_the_page_reads_the_golden_run(golden: Path) -> None:
    folder = Folder(golden)
    assert [(commit["step"], commit["generation"]) for commit in folder.visible()] == [(2, 0), (3, 1)]
    for commit in folder.visible():
        assert folder.pieces(commit)
        chain, record = list(folder.journal(commit["generation"]))[commit["journal_lines"] - 1]
        assert (chain, record["type"], record["step"]) == (commit["journal_head"], "root", commit["step"])


@pytest.mark.parametrize("pattern", ["run.json", "runs/main/log/*6.json", "manifests/*3-1-*.json", "packs/a7/*.pack"])
def test_I3_a_reader_written_from_the_page_finds_a_changed_byte(tmp_path: Path, pattern: str) -> None:
    for file in GOLDEN.rglob("*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(GOLDEN)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    (changed,) = tmp_path.glob(pattern)
    raw = bytearray(changed.read_bytes())
    raw[-80] ^= 1
    changed.write_bytes(raw)
    with pytest.raises((Broken, ValueError, KeyError)):
        folder = Folder(tmp_path)
        for commit in folder.visible():
            folder.pieces(commit)


# -- failure modes -----------------------------------------------------------------------------------------------------------


def quoted() -> list[str]:
    """Every message of the tables, from the column that says what is seen."""
    return [word for cells in rows(text_of("docs/failure-modes.md")) if len(cells) == 3 for word in words(cells[1]) if " " in word]


def test_every_message_is_said_by_the_code() -> None:
    assert len(quoted()) > 50
    lacking = [message for message in quoted() if not is_said(message)]
    assert not lacking


def is_said(message: str) -> bool:
    """Do its parts stand in the code, those between two values as a whole?"""
    parts = [part.strip() for part in message.split("…") if len(part.strip()) > 2]
    return bool(parts) and all(part in said() for part in parts)


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert not is_said("the folder is on fire: choose … instead")
    assert not is_said("…")


def test_every_error_that_the_tables_name_exists() -> None:
    text = " ".join(cells[1] for cells in rows(text_of("docs/failure-modes.md")))
    named = set(re.findall(r"\b([A-Z][a-z]+(?:[A-Z][a-z]+)+)\b", re.sub(r"`[^`]*`", "", text)))
    assert len(named) > 12
    lacking = {name for name in named if not hasattr(unbroken, name) and not hasattr(builtins, name)}
    assert not lacking, "not a class of `unbroken`, as the head of the page says"
