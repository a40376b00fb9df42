"""A long run is certified in one pass: time and memory per step stay small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.synthetic_run import SyntheticRun
from unbroken.store.tiers.disk import DiskTier

ROOT = Path(__file__).resolve().parents[3]

MEASURE = """
import json, resource, sys, time
from unbroken.proof.certify import certify
from unbroken.store.tiers.disk import DiskTier
began = time.process_time()
certificate = certify(DiskTier(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([certificate.certified, certificate.steps, time.process_time() - began, peak]))
"""


def measure(folder: Path, num_steps: int) -> tuple[float, int]:
    """(CPU seconds, peak bytes) of certifying a run of so many steps, in a process of its own."""
    run = SyntheticRun(DiskTier(str(folder)))
    run.begin()
    for _ in range(10):
        run.train(num_steps // 10)
        run.save()
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    certified, steps, seconds, peak_bytes = json.loads(done.stdout)
    assert (certified, steps) == (True, num_steps)
    return seconds, peak_bytes


def test_memory_does_not_grow_with_the_journal(tmp_path: Path) -> None:
    _, small = measure(tmp_path / "small", 2_000)
    _, large = measure(tmp_path / "large", 40_000)
    assert large - small < 24 << 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_campaign_a_million_steps_within_a_minute_and_200_megabytes(tmp_path: Path) -> None:
    seconds, peak_bytes = measure(tmp_path / "run", 1_000_000)
    assert seconds < 60
    assert peak_bytes < 200e6
