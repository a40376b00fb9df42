"""Names: one spelling each, strays are nobody's."""

from __future__ import annotations

import pytest

from unbroken.store import paths


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("runs/main/log/00000007.json", 7),
        ("runs/main/log/123456789.json", 123456789),
        ("runs/main/journal/00000003.jsonl", 3),
        ("runs/main/log/7.json", None),
        ("runs/main/log/000000007.json", None),
        ("runs/main/log/-0000007.json", None),
        ("runs/main/log/00000007.json.bak", None),
        ("runs/main/log/step_abc.json", None),
        ("runs/main/log/99999999999999999999.json", None),
    ],
)
def test_B08_c_numbers_have_one_spelling(name: str, number: int | None) -> None:
    assert paths.number(name) == number


def test_names_come_back_from_what_they_were_made_of() -> None:
    nonce = "0123456789abcdef" * 2
    assert paths.manifest_name(paths.manifest(30, 2, nonce, 1)) == (30, 2, nonce[:16], 1)
    assert paths.pack_origin(paths.pack(nonce)) == nonce[:16]
    assert paths.origin(nonce) == nonce[:16]


@pytest.mark.parametrize("path", ["packs/../../x", "packs/01/02ff.pack", "packs/aa/bb" + "0" * 30 + ".pack", "/packs/x.pack", "../x.pack"])
def test_other_paths_are_no_packs(path: str) -> None:
    assert paths.pack_origin(path) is None


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 65, "a\n"])
def test_lineage_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="lineage"):
        paths.check_lineage(name)
