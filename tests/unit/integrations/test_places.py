"""checkpoint_id and url: which folder and step are meant, and what contradicts itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unbroken.integrations.dcp import StorageReader, StorageWriter
from unbroken.integrations.places import place_of


@pytest.mark.parametrize(
    ("url", "checkpoint_id", "step", "place"),
    [
        ("a/b", None, 7, ("a/b", 7)),
        ("a/b", None, None, ("a/b", None)),
        (None, "a/b/step-100", None, ("a/b", 100)),
        (None, "a/b/step_0100/", None, ("a/b", 100)),
        (None, "step-5", None, (".", 5)),
        (None, "a/b", 7, ("a/b", 7)),
        ("a/b", "a/b/step-100", 100, ("a/b", 100)),
        ("a/b", "./a/b", 7, ("a/b", 7)),
        ("a/step-3", None, 4, ("a/step-3", 4)),
        ("a/step-3", "a/step-3", 4, ("a/step-3", 4)),
        (None, "file:///x/step-9", None, ("/x", 9)),
        (Path("a/b"), Path("a/b/step-1"), None, ("a/b", 1)),
    ],
)
def test_what_is_meant(url: str | None, checkpoint_id: str | None, step: int | None, place: tuple[str, int | None]) -> None:
    found = place_of(url, checkpoint_id, step)
    assert (os.fspath(found.folder), found.step) == place


@pytest.mark.parametrize(
    ("url", "checkpoint_id", "step", "reason"),
    [
        (None, None, 7, "no folder"),
        ("a/b", "a/b/step-100", 7, "means step 100, but step=7"),
        ("a/b", "a/c/step-100", None, "means the folder 'a/c', but 'a/b' was given"),
        ("a/b", "a/b/../../etc/step-1", None, "one folder holds all steps"),
        ("a/b", "a/b/best", 3, "one folder holds all steps"),
        (None, "s3://bucket/step-1", None, "only a folder's path"),
        (None, "", None, "name is empty"),
    ],
)
def test_what_contradicts_itself_is_an_error(url: str | None, checkpoint_id: str | None, step: int | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        place_of(url, checkpoint_id, step)


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", 10**12])
def test_a_step_that_is_none_is_refused(step: object) -> None:
    for made in (lambda: StorageWriter("x", step=step), lambda: StorageReader("x", step)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a whole number from 0"):
            made()


@pytest.mark.parametrize("keep", [0, -1, True, 2.5])
def test_retention_that_keeps_nothing_is_refused(keep: object) -> None:
    with pytest.raises(ValueError, match="keep at least 1"):
        StorageWriter("x", step=1, keep=keep)  # type: ignore[arg-type]


def test_ids_that_name_no_folder_of_this_host_are_not_ours() -> None:
    assert StorageWriter.validate_checkpoint_id("a/step-1") and not StorageReader.validate_checkpoint_id("s3://bucket/step-1")
