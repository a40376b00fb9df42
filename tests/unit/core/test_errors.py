"""Errors travel: other libraries send them from rank to rank as they are."""

from __future__ import annotations

import pickle

import pytest

from unbroken.core import errors

MADE = [
    errors.Damaged("packs/x", "cut short"),
    errors.Unsound(["nan in /w", "nan in /b"]),
    errors.MissingExtra("obstore", "object"),
    errors.LayoutMismatch("does not fit", missing=("/w",)),
    *(kind("text") for kind in (errors.NoCheckpoint, errors.Fenced, errors.Refused, errors.NewerFormat, errors.ForeignFolder)),
    *(kind("text") for kind in (errors.SaveFailed, errors.Permanent, errors.Transient, errors.GaveUp, errors.StepLost)),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_comes_over_with_its_type_text_and_fields(error: Exception) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other), other.__dict__) == (type(error), str(error), error.__dict__)
