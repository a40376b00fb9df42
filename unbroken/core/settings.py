"""Settings from four places: explicit argument > UNBROKEN_* environment > unbroken.toml > default. Each value knows where it came from.

A table lists the settings of one thing (a run, the launcher); its name is the section of unbroken.toml. Everything else comes from the
table: names of variables and keys, what is accepted, the errors, the documentation.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.core.limits import MAX_SETTINGS_BYTES
from unbroken.core.ports import environment

FILE_NAME = "unbroken.toml"
FILE_VARIABLE = "UNBROKEN_CONFIG"
PREFIX = "UNBROKEN_"

SECTIONS = ("run", "launch")
"""Sections that unbroken.toml may have. Who owns one checks its keys."""

OTHER_VARIABLES = frozenset(
    PREFIX + name for name in ("CONFIG", "LAUNCHER_PID", "KEEPER_PID", "LAUNCH_FILE", "REPLAY", "FAULTS", "FAULT_LOG", "CAMPAIGN")
)
"""Variables of ours that are no settings."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of a table.

    accepts: a value's form, in words. check: the value that is used for one that was given, or a ValueError with the remedy alone.
    from_text: an environment variable's text as a value to be checked. shown: a value as an error may say it, secrets left out. A setting
    whose default is None may be given as None: left out.
    """

    name: str
    default: Any
    accepts: str
    help: str
    check: Callable[[Any], Any]
    from_text: Callable[[str], Any] = str
    shown: Callable[[Any], str] = repr

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True)
class Table:
    """The settings of one section, in the order in which they are shown."""

    section: str
    settings: tuple[Setting, ...]

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(setting.name for setting in self.settings)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A setting as it stands: `given` as it was written, `value` as it is used, `origin` "argument", "default", a variable or file:line."""

    setting: Setting
    given: Any
    value: Any
    origin: str

    @property
    def is_foreign(self) -> bool:
        """Did it come from somewhere that the script does not show?"""
        return self.origin not in ("argument", "default")


@dataclass(frozen=True)
class SettingsFile:
    """A parsed unbroken.toml."""

    path: str
    text: str
    content: Mapping[str, Any]

    def place(self, section: str, key: str = "") -> str:
        """file:line of a key, or of the section's head; the file alone where that is written in another way."""
        inside = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if head := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
                inside = head[1].strip("\"'")
            if inside == section and (re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) if key else head):
                return f"{self.path}:{number}"
        return self.path


def find_file() -> str | None:
    """The file that UNBROKEN_CONFIG names; else unbroken.toml in the working directory or its nearest parent within the repository."""
    named = environment(FILE_VARIABLE)
    if named:
        return os.path.abspath(named)
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it has been removed
        return None
    parents = [folder]
    while os.path.dirname(parents[-1]) != parents[-1]:
        parents.append(os.path.dirname(parents[-1]))
    roots = [number for number, parent in enumerate(parents) if os.path.exists(os.path.join(parent, ".git"))]
    for parent in parents[: roots[0] + 1 if roots else 1]:
        path = os.path.join(parent, FILE_NAME)
        if os.path.lexists(path):
            return path
    return None


def read_file(path: str | None) -> SettingsFile | None:
    """Parse a settings file, None for none; ValueError names file, line and remedy."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_SETTINGS_BYTES + 1)
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
        raise ValueError(f"{why}; {FILE_VARIABLE} names it: correct or unset it" if environment(FILE_VARIABLE) else why) from None
    if len(raw) > MAX_SETTINGS_BYTES:
        raise ValueError(f"{path}: larger than {MAX_SETTINGS_BYTES} bytes, which no settings are")
    try:
        text = raw.decode("utf-8")
        content = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8: save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # also of Python itself, for numbers of thousands of digits
        where = re.search(r"at line (\d+)", str(error))
        raise ValueError(f"{path}{f':{where[1]}' if where else ''}: not TOML: {error}") from None
    return SettingsFile(path, text, content)


def gather(table: Table, given: Mapping[str, Any], file: SettingsFile | None) -> dict[str, Found]:
    """Every setting of a table with its value and origin. `given`: explicit arguments. ValueError or TypeError names what is wrong."""
    _require_known(table, given)
    section = _section(table, file)
    found = {}
    for setting in table.settings:
        if setting.name in given and (given[setting.name] is not None or setting.default is not None):
            found[setting.name] = _checked(setting, given[setting.name], "argument", f"{setting.name}={setting.shown(given[setting.name])}")
        elif text := environment(setting.variable):
            found[setting.name] = _checked(
                setting, setting.from_text(text), setting.variable, f"{setting.variable} is {setting.shown(text)}"
            )
        elif setting.name in section:
            assert file is not None
            value, place = section[setting.name], file.place(table.section, setting.name)
            found[setting.name] = _checked(setting, value, place, f"{place}: {setting.name} = {setting.shown(value)}")
        else:
            value = None if setting.default is None else setting.check(setting.default)
            found[setting.name] = Found(setting=setting, given=setting.default, value=value, origin="default")
    return found


def check(table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of explicit arguments and defaults alone."""
    _require_known(table, given)
    values = {}
    for setting in table.settings:
        value = given.get(setting.name, setting.default)
        left_out = value is None and setting.default is None
        values[setting.name] = None if left_out else _checked(setting, value, "argument", f"{setting.name}={setting.shown(value)}").value
    return values


def strange_variables(names: Mapping[str, str], *tables: Table) -> dict[str, str]:
    """UNBROKEN_* variables that nothing reads, each with the nearest name that something does read, or ""."""
    known = OTHER_VARIABLES | {setting.variable for table in tables for setting in table.settings}
    return {name: _nearest(name, known) for name in sorted(names) if name.startswith(PREFIX) and name not in known}


def _require_known(table: Table, given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(table.names))
    if unknown:
        near = sorted({_nearest(name, table.names) for name in unknown} - {""})
        meant = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise TypeError(f"{table.section.title()}() got unknown options {unknown}; known are {table.names}{meant}")


def _section(table: Table, file: SettingsFile | None) -> Mapping[str, Any]:
    """The table's section of the file; ValueError for what nobody would read."""
    if file is None:
        return {}
    for name, value in file.content.items():
        if name not in SECTIONS:
            here = f"did you mean {name!r} in [{table.section}]?" if name in table.names else ""
            near = _nearest(name, SECTIONS) if isinstance(value, dict) else ""
            meant = here or (f"did you mean [{near}]?" if near else f"sections are {', '.join(f'[{one}]' for one in SECTIONS)}")
            place = file.place(name) if isinstance(value, dict) else file.place("", name)
            raise ValueError(f"{place}: {name!r} is not known here: {meant}")
        if not isinstance(value, dict):
            raise ValueError(f"{file.place('', name)}: {name!r} must be a section: write [{name}] and its keys below")
    section: Mapping[str, Any] = file.content.get(table.section, {})
    for key in section:
        if key not in table.names:
            near = _nearest(key, table.names)
            meant = f"did you mean {near!r}?" if near else f"known are {', '.join(table.names)}"
            raise ValueError(f"{file.place(table.section, key)}: [{table.section}] has no {key!r}: {meant}")
    return section


def _checked(setting: Setting, given: Any, origin: str, head: str) -> Found:
    try:
        return Found(setting=setting, given=given, value=setting.check(given), origin=origin)
    except ValueError as error:
        raise ValueError(f"{head}: {error}") from None
    except TypeError as error:
        if origin == "argument":
            raise
        raise ValueError(f"{head}: {error}") from None  # nobody has passed an argument: a text or a file is wrong, and it has to be named


def _nearest(name: str, known: Any) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), "")


def number(text: str) -> Any:
    """A variable's text as a whole number where it is one; else the text itself, which the check refuses with what it accepts."""
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) and len(text) < 40 else text


def whole(value: Any, at_least: int = 1, at_most: int | None = None, what: str = "") -> int:
    """A check: a whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"give a whole number of at least {at_least}")
    if at_most is not None and value > at_most:
        raise ValueError(f"at most {at_most}{what}")
    return value


def one_of(value: Any, allowed: Mapping[str, str]) -> str:
    """A check: one of these words, each with its explanation (or "")."""
    if not isinstance(value, str) or value not in allowed:
        words = [f'"{word}"' + (f" ({meaning})" if meaning else "") for word, meaning in allowed.items()]
        raise ValueError(f"give {', '.join(words[:-1])} or {words[-1]}")
    return value
