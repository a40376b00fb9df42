"""What a quantised history takes, and how wrong it is: the history of `bench.history` (20 checkpoints, 10 steps apart) by each scheme.

    python -m bench.quantised [--width 256 --depth 6] [--warm 300] > bench/results/quantised.json

The first checkpoint is exact, each following one is encoded from the one restored before it, as a reader would have it. Bytes are
compared with those of 20 copies, as they are and by zstd. Errors are of single elements, over all 19 checkpoints: the largest and the
mean, and both over the root mean square of the tensor's elements, worst tensor first. "mixed": weights in 8 bits, moments in 4.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import zstandard

from bench.history import EVERY, NUM, states
from unbroken.codec import planes
from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.quantised import DTYPES, Scheme, domain_of, quantise, restore
from unbroken.core.records import Piece
from unbroken.store.repository import Part

ARMS: dict[str, dict[str, Scheme]] = {
    "fp8": {"difference": "fp8", "plain": "fp8", "root": "fp8"},
    "int8": {"difference": "int8", "plain": "int8", "root": "int8"},
    "int4": {"difference": "int4", "plain": "int4", "root": "int4"},
    "mixed": {"difference": "int8", "plain": "int4", "root": "int4"},
}


def domain(piece: Piece) -> str:
    """As for a Run's pieces: those of a Store do not say what they are."""
    return "difference" if piece.pointer.startswith("/model/") else domain_of(piece)


class Arm:
    """One scheme's history: what it takes, and the state as it is restored."""

    def __init__(self, schemes: dict[str, Scheme]) -> None:
        self.schemes = schemes
        self.bytes, self.encode_s, self.decode_s, self.coded_bytes = 0, 0.0, 0.0, 0
        self.errors: dict[str, list[tuple[float, float, float]]] = {"difference": [], "plain": [], "root": []}
        self._before: dict[str, bytes] = {}

    def add(self, parts: list[Part]) -> None:
        restored: dict[str, bytes] = {}
        for part in parts:
            data, piece = bytes(part.data), part.piece
            old = self._before.get(piece.pointer)
            if piece.dtype not in DTYPES or not self._before:
                self.bytes += len(planes.encode(data, ITEM_BYTES.get(piece.dtype, 1)).data)
                restored[piece.pointer] = data
                continue
            restored[piece.pointer] = self._code(piece, data, old)
        self._before = restored

    def _code(self, piece: Piece, data: bytes, old: bytes | None) -> bytes:
        which = domain(piece)
        began_s = time.process_time()
        encoded = quantise(data, piece.dtype, self.schemes[which], which, old)  # type: ignore[arg-type]
        encoded_s = time.process_time()
        back = restore(encoded.data, piece.dtype, len(data), old)
        self.encode_s += encoded_s - began_s
        self.decode_s += time.process_time() - encoded_s
        self.coded_bytes += len(data)
        self.bytes += len(encoded.data)
        exact = np.frombuffer(data, "<f4").astype(np.float64)
        error = np.abs(np.frombuffer(back, "<f4") - exact)
        assert len(error) == 0 or error.max() <= encoded.bound
        if len(data) > 1024:
            self.errors[which].append((float(error.max()), float(error.mean()), float(np.sqrt(np.mean(exact**2))) or 1.0))
        return back

    def facts(self, raw_bytes: int, zstd_bytes: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bytes": self.bytes,
            "saving": 1 - self.bytes / raw_bytes,
            "saving_against_zstd": 1 - self.bytes / zstd_bytes,
            "encode_cpu_s_per_gb": self.encode_s / (self.coded_bytes / 1e9),
            "decode_cpu_s_per_gb": self.decode_s / (self.coded_bytes / 1e9),
        }
        names = {"difference": "weights", "plain": "exp_avg", "root": "exp_avg_sq"}
        for which, errors in self.errors.items():
            if errors:
                found[names[which]] = {
                    "max_error": max(most for most, _, _ in errors),
                    "mean_error": statistics.fmean(mean for _, mean, _ in errors),
                    "max_error_over_rms": max(most / rms for most, _, rms in errors),
                    "mean_error_over_rms": statistics.fmean(mean / rms for _, mean, rms in errors),
                }
        return found


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--warm", type=int, default=300)
    options = parser.parse_args()
    arms = {name: Arm(schemes) for name, schemes in ARMS.items()}
    raw_bytes = zstd_bytes = 0
    compressor = zstandard.ZstdCompressor(level=3)
    for number, parts in enumerate(states(options.width, options.depth, options.warm, frozen=False)):
        for part in parts:
            raw_bytes += len(part.data)
            zstd_bytes += min(len(part.data), len(compressor.compress(bytes(part.data))))
        for arm in arms.values():
            arm.add(parts)
        print(f"{number + 1}: {raw_bytes >> 20} MiB, { ({name: arm.bytes >> 20 for name, arm in arms.items()}) }", file=sys.stderr)
    found = {name: arm.facts(raw_bytes, zstd_bytes) for name, arm in arms.items()}
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    facts = {"options": vars(options), "machine": machine, "num": NUM, "every": EVERY}
    json.dump(facts | {"raw_bytes_of_20": raw_bytes, "zstd_bytes_of_20": zstd_bytes} | found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
