"""docs/configuration.md says what the tables say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from unbroken.cluster.settings import LAUNCH
from unbroken.config import RUN
from unbroken.core.settings import FILE_VARIABLE, SECTIONS, SettingsFile, Table, gather

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLES = (RUN, LAUNCH)


def rows(table: Table) -> list[str]:
    """The page's rows for a table."""
    return [
        f"| `{s.name}` | {'' if s.default is None else f'`{s.default}`'} | {s.accepts} | {s.help} |" for s in table.settings
    ]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.section)
def test_every_setting_stands_on_the_page_as_in_its_table(table: Table) -> None:
    section = PAGE.partition(f"## `[{table.section}]`")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("| `")]
    assert found == rows(table)


def test_the_sections_of_the_file_are_the_tables() -> None:
    assert tuple(table.section for table in TABLES) == SECTIONS
    assert FILE_VARIABLE in PAGE


def test_the_example_is_accepted() -> None:
    text = PAGE.partition("```toml\n")[2].partition("```")[0]
    file = SettingsFile("unbroken.toml", text, tomllib.loads(text))
    values = {found.setting.name: found.origin for table in TABLES for found in gather(table, {}, file).values() if found.is_foreign}
    assert values == {"lose_at_most": "unbroken.toml:2", "keep": "unbroken.toml:3", "grace_s": "unbroken.toml:6"}


if __name__ == "__main__":  # what belongs on the page
    print("\n\n".join("\n".join(rows(table)) for table in TABLES))
