"""What the daemon's look for NaN costs: processor seconds per GB, beside the hash that every byte gets anyway.

python bench/finite.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from unbroken.capture.tensors import DTYPES
from unbroken.codec.digest import digest
from unbroken.codec.finite import fault

SIZE_BYTES = 128 << 20
TRIALS = 7
TYPES = ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "complex64")


def seconds_per_gb(act: Callable[[], object]) -> float:
    """Median over the trials, of this process's own time: other work on the machine does not count."""
    taken = []
    for _ in range(TRIALS):
        began = time.process_time()
        act()
        taken.append((time.process_time() - began) * 1e9 / SIZE_BYTES)
    return round(statistics.median(taken), 4)


def main() -> None:
    """Print one line per type, and write them down if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    for name in TYPES:
        dtype = DTYPES[name]
        values = torch.randn(SIZE_BYTES // dtype.itemsize, dtype=torch.float32).to(dtype)
        data = values.view(torch.uint8).numpy().data
        assert fault(name, data) == ""
        found[name] = seconds_per_gb(lambda name=name, data=data: fault(name, data))  # type: ignore[misc]
        print(f"{name:16} {found[name]:.4f} s/GB")
    found["hash"] = seconds_per_gb(lambda: digest(data))
    print(f"{'hash':16} {found['hash']:.4f} s/GB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds_per_gb": found, "trials": TRIALS, "size_bytes": SIZE_BYTES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
