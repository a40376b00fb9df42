"""A checkpoint named in one word."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.archive.places import parse_place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("runs/gpt", ("runs/gpt", "main", None)),
        ("runs/gpt@40", ("runs/gpt", "main", 40)),
        ("runs/gpt@hot", ("runs/gpt", "hot", None)),
        ("runs/gpt@hot:40", ("runs/gpt", "hot", 40)),
        ("a@b@3", ("a@b", "main", 3)),
    ],
)
def test_places(text: str, place: tuple[str, str, int | None]) -> None:
    assert tuple(parse_place(text)) == place


@pytest.mark.parametrize("text", ["x@", "x@hot:", "x@hot:y", "@3", "x@a/b", "x@hot:-1", "x@../y:3"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_place(text)


def test_a_folder_with_an_at_in_its_name_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "x@3").mkdir()
    assert parse_place(str(tmp_path / "x@3")) == (str(tmp_path / "x@3"), "main", None)
    assert parse_place(str(tmp_path / "x@3@7")) == (str(tmp_path / "x@3"), "main", 7)
