"""What a user may give `Batches`: one data set or several with weights, and lists of samples to skip, turned into parts of an order."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from unbroken.core.limits import MAX_DATASETS, MAX_SHARES, MAX_SKIPPED
from unbroken.data.source import Keyed
from unbroken.order.mixture import Part
from unbroken.order.skips import NO_SKIPS, Skips

MAX_LINE_CHARS = 64
"""Of a line in a list of skipped samples."""

MAX_NAME_CHARS = 100


class Mixed:
    """Several map-style data sets as one, in the order of their names: sample i of it is sample i - `starts[k]` of the k-th."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.names = sorted(datasets)
        self._datasets = [unkeyed(datasets[name]) for name in self.names]
        self._starts = [0, *accumulate(len(dataset) for dataset in self._datasets)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        number = self._number(index)
        return self._datasets[number][index - self._starts[number]]

    def origin(self, index: int) -> tuple[str, int]:
        """Name of the data set and the index in it; IndexError outside."""
        number = self._number(index)
        return self.names[number], index - self._starts[number]

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return bisect_right(self._starts, index) - 1


def unkeyed(dataset: Any) -> Any:
    """The user's own data set."""
    return dataset.dataset if isinstance(dataset, Keyed) else dataset


def check_dataset(dataset: Any) -> int:
    """Length of a map-style data set; TypeError with the remedy for anything else, ValueError for an empty one."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{type(dataset).__name__} is not a map-style data set (__len__ and __getitem__): its items cannot be looked up by position; "
            "give data= a loader with state_dict and load_state_dict instead"
        )
    if not len(dataset):
        raise ValueError("the data set is empty: there is nothing to train on")
    return len(dataset)


def is_mixture(dataset: Any, weights: Any) -> bool:
    """A dict of data sets by name, with weights; TypeError with the remedy where only one of the two was given."""
    named = isinstance(dataset, Mapping) and bool(dataset) and all(isinstance(key, str) for key in dataset)
    if named and weights is None:
        raise TypeError(f"several data sets {sorted(dataset)!r:.200} need weights={{name: share of the samples}}, or give one data set")
    if weights is not None and not named:
        raise TypeError("weights= is for several data sets: give them as a dict, such as {'web': web, 'code': code}")
    return named


def one_part(dataset: Any, skip: Any) -> list[Part]:
    """The one data set, without the samples to skip."""
    num_samples = check_dataset(dataset)
    return [Part("", num_samples, skips=read_skips(skip, num_samples, "skip="))]


def mixture_parts(datasets: Mapping[str, Any], weights: Any, skip: Any) -> list[Part]:
    """The parts of a mixture, by name; TypeError or ValueError names what does not fit."""
    if not isinstance(weights, Mapping) or set(weights) != set(datasets):
        raise ValueError(f"weights= must give one share for each of {sorted(datasets)!r:.200}, not {weights!r:.200}")
    if len(datasets) > MAX_DATASETS:
        raise ValueError(f"{len(datasets)} data sets: at most {MAX_DATASETS} can be mixed")
    wrong = [name for name in datasets if not name or len(name) > MAX_NAME_CHARS]
    if wrong:
        raise ValueError(f"a data set's name has 1 to {MAX_NAME_CHARS} characters, not {wrong[0]!r:.200}")
    skip = {} if skip is None else skip
    if not isinstance(skip, Mapping) or not set(skip) <= set(datasets):
        raise ValueError(f"skip= of several data sets is a dict of lists by name, out of {sorted(datasets)!r:.200}: {{'name': [ids]}}")
    shares = whole_shares(weights)
    return [
        Part(name, num, shares[name], read_skips(skip.get(name), num, f"skip[{name!r}]"))
        for name, num in ((name, check_dataset(datasets[name])) for name in sorted(datasets))
    ]


def whole_shares(weights: Mapping[str, Any]) -> dict[str, int]:
    """Weights as the smallest whole numbers in the same relation: {0.7, 0.3} is {7, 3}. Decimals are meant as they are written.

    Where that takes larger numbers than their limit (weights like 1/3), the nearest ones within it: then a share is off by 1e-9.
    """
    exact = {name: _fraction(name, weight) for name, weight in weights.items()}
    scale = math.lcm(*(value.denominator for value in exact.values()))
    shares = {name: int(value * scale) for name, value in exact.items()}
    common = math.gcd(*shares.values())
    total = sum(shares.values()) // common
    if total <= MAX_SHARES:
        return {name: share // common for name, share in shares.items()}
    room = MAX_SHARES - len(shares)
    return {name: max(1, share // common * room // total) for name, share in shares.items()}


def _fraction(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction) or not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"weights[{name!r}]={weight!r:.100}: give a number above 0; leave a data set out that is not to be used")
    return Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight)


def read_skips(given: Any, num_samples: int, where: str) -> Skips:
    """Ids, ranges of them or a text file as a checked list; ValueError or TypeError names the first id or line that is wrong."""
    if given is None:
        return NO_SKIPS
    if isinstance(given, str | os.PathLike):
        where, given = f"{where}{os.fspath(given)}", _from_file(os.fspath(given))
    ids = np.sort(_as_array(given, where))
    if len(ids) > 1 and bool((same := np.diff(ids) == 0).any()):
        raise ValueError(f"{where}: sample {int(ids[int(same.argmax())])} is named twice: name each once")
    outside = ids[(ids < 0) | (ids >= num_samples)]
    if len(outside):
        raise ValueError(f"{where}: there is no sample {int(outside[0])}: the data set has {num_samples}, ids count from 0")
    if len(ids) == num_samples:
        raise ValueError(f"{where}: all {num_samples} samples are skipped: there is nothing to train on")
    return Skips(ids)


def _as_array(given: Any, where: str) -> NDArray[np.int64]:
    """A tensor, an array, a range, or an iterable of whole numbers and ranges as one array; too many are refused before memory is."""
    given = given.numpy(force=True) if isinstance(given, torch.Tensor) else given
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TypeError(f"{where}: ids are whole numbers in one dimension, not {given.dtype} in {given.ndim}")
        _few(given.size, where)
        if given.dtype.kind == "u" and given.size and int(given.max()) >= 2**63:
            raise ValueError(f"{where}: there is no sample {int(given.max())}")
        return given.astype(np.int64)
    if isinstance(given, range):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise TypeError(f"{where}: give ids, ranges of ids, or the path of a text file, not {given!r:.100}")
    numbers, parts, num = [], [], 0
    for item in given:
        if isinstance(item, range):
            num += len(item)
            _few(num, where)
            parts.append(np.arange(item.start, item.stop, item.step, dtype=np.int64))
        elif isinstance(item, int | np.integer) and not isinstance(item, bool) and -(2**63) <= item < 2**63:
            num += 1
            _few(num, where)
            numbers.append(int(item))
        else:
            raise TypeError(f"{where}: ids are whole numbers, or ranges of them, not {item!r:.100}")
    return np.concatenate([np.array(numbers, dtype=np.int64), *parts])


def _few(num: int, where: str) -> None:
    if num > MAX_SKIPPED:
        raise ValueError(f"{where}: more than {MAX_SKIPPED} ids: leave the samples out of the data set instead (torch.utils.data.Subset)")


def _from_file(path: str) -> Iterator[int | range]:
    """Lines of a text file: `17`, or `20:30` for 20 to 29; what follows a # is a remark."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARS + 1), ""), start=1):
            text = line.split("#", 1)[0].strip()
            try:
                if len(line) > MAX_LINE_CHARS:
                    raise ValueError
                bounds = [int(bound) for bound in text.split(":")] if text else []
                if len(bounds) == 2:
                    yield range(*bounds)
                elif text:
                    (only,) = bounds
                    yield only
            except ValueError:
                raise ValueError(f"{path} line {number}: {text!r:.60} is neither an id such as 17 nor a range such as 20:30") from None


def as_parts(dataset: Any, weights: Any, skip: Any) -> tuple[Any, Sequence[Part]]:
    """One map-style data set over all that was given, and the parts of its order."""
    if is_mixture(dataset, weights):
        return Mixed(dataset), mixture_parts(dataset, weights, skip)
    return dataset, one_part(dataset, skip)
