"""The limits of the house, kept by a test: sizes of functions, classes and files, banned names, no paths of one machine."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("unbroken", "tests", "bench", "examples")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".cfg", ".html", ".json", ".jsonl", ""}
SKIPPED = {".git", ".venv", "build", "__pycache__", "demo-run", "out", ".mypy_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache"}

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 600
MAX_CLASS_LINES = 300
MAX_PUBLIC_METHODS = 15
MAX_CONSTRUCTOR_PARAMETERS = 10
MAX_PROTOCOL_METHODS = 8
BANNED_FILES = {"utils.py", "helpers.py", "common.py", "misc.py"}
BANNED_CLASSES = re.compile(r"(Manager|Handler|Processor|Helper)$")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|Users)/[a-z]\w*/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems_of(name: str, source: str) -> Iterator[str]:
    """Everything in one Python file that breaks a limit, as "file:line: what"."""
    if Path(name).name in BANNED_FILES:
        yield f"{name}:1: a file name that says nothing; name it after what it does"
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{name}:1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            yield from _function_problems(name, node)
        elif isinstance(node, ast.ClassDef):
            yield from _class_problems(name, node)


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _function_problems(name: str, node: Function) -> Iterator[str]:
    if _lines(node) > MAX_FUNCTION_LINES:
        yield f"{name}:{node.lineno}: function {node.name} has {_lines(node)} lines, at most {MAX_FUNCTION_LINES}"


def _class_problems(name: str, node: ast.ClassDef) -> Iterator[str]:
    where = f"{name}:{node.lineno}: class {node.name}"
    methods = [child for child in node.body if isinstance(child, Function)]
    public = [method for method in methods if not method.name.startswith("_")]
    if BANNED_CLASSES.search(node.name):
        yield f"{where}: a name that says nothing; name it after what it is"
    if _lines(node) > MAX_CLASS_LINES:
        yield f"{where} has {_lines(node)} lines, at most {MAX_CLASS_LINES}"
    if len(public) > MAX_PUBLIC_METHODS:
        yield f"{where} has {len(public)} public methods, at most {MAX_PUBLIC_METHODS}"
    if any("Protocol" in ast.unparse(base) for base in node.bases) and len(methods) > MAX_PROTOCOL_METHODS:
        yield f"{where} is a Protocol of {len(methods)} methods, at most {MAX_PROTOCOL_METHODS}"
    for method in methods:
        arguments = method.args
        num_parameters = len(arguments.posonlyargs) + len(arguments.args) - 1 + len(arguments.kwonlyargs)
        if method.name == "__init__" and num_parameters > MAX_CONSTRUCTOR_PARAMETERS:
            yield f"{where}: its constructor takes {num_parameters} parameters, at most {MAX_CONSTRUCTOR_PARAMETERS}"


def _files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith(".egg-info")]
        yield from (Path(folder, name) for name in names)


def test_code_keeps_the_limits() -> None:
    code = [path for path in _files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in CODE]
    assert len(code) > 20, "the walk lost the code"
    found = [problem for path in code for problem in problems_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_no_file_names_a_place_of_one_machine() -> None:
    found = []
    for path in _files():
        if path.suffix not in TEXT_SUFFIXES or path.stat().st_size > 1 << 20:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for match in re.finditer(f"{re.escape(str(ROOT))}|{MACHINE_PATHS.pattern}", text):
            found.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}")
    assert not found, "\n" + "\n".join(found)


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70
LONG_CLASS = "class A:\n" + "    x = 1\n" * 300
MANY_METHODS = "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(16))
MANY_PARAMETERS = f"class A:\n    def __init__(self, {', '.join(f'p{i}' for i in range(11))}): ...\n"
WIDE_PROTOCOL = "class A(Protocol):\n" + "".join(f"    def m{i}(self): ...\n" for i in range(9))


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("a.py", LONG_FUNCTION, "function f has 71 lines"),
        ("a.py", "x = 1\n" * 601, "601 lines"),
        ("a.py", LONG_CLASS, "class A has 301 lines"),
        ("a.py", MANY_METHODS, "16 public methods"),
        ("a.py", MANY_PARAMETERS, "11 parameters"),
        ("a.py", WIDE_PROTOCOL, "Protocol of 9 methods"),
        ("a.py", "class SlotManager: ...\n", "class SlotManager"),
        ("core/utils.py", "", "file name"),
    ],
)
def test_each_limit_can_fail(name: str, source: str, words: str) -> None:
    assert [problem for problem in problems_of(name, source) if words in problem]


def test_what_is_just_within_the_limits_passes() -> None:
    assert not list(problems_of("a.py", LONG_FUNCTION.removesuffix("    x = 1\n")))
    assert not list(problems_of("a.py", "class Slot:\n    def __init__(self, a, b, c, d, e, f, g, h, i, j): ...\n"))
