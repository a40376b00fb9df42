#!/bin/sh
# What only an accelerator can show, in about 5 minutes on a machine with one: synchronisations in a step, the copy of a large share to
# the host while training, and how long a killed worker takes to come back. Writes gpu_check.json into the folder given (or $OUT, or here).
set -eu
cd "$(dirname "$0")/.."
out="${1:-${OUT:-bench/results}}"
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
mkdir -p "$out"
exec "$python" -W ignore -m bench.gpu_check --out "$out/gpu_check.json"
