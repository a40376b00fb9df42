# Few verbs; CI calls them verbatim. On a fresh machine `make demo` or `make test` alone does all set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO_DIR ?= demo-run
DEMO_ARGS ?=

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: setup demo test check bench docs campaign-exact campaign-crash campaigns fuzz bench-recovery bench-overhead bench-store bench-scale help

setup: $(STAMP) ## Make .venv and install everything that is needed, pinned.

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,loggers,dev]'
	touch $@

demo: $(STAMP) ## Train, kill, continue, prove: the main job, at most 3 minutes on 2 cores.
	rm -rf $(DEMO_DIR)
	$(BIN)/unbroken demo --dir $(DEMO_DIR) $(DEMO_ARGS)

test: $(STAMP) ## All tests: most of them two at a time, then those with bounds in seconds one by one.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not alone"
	$(BIN)/python -m pytest -m alone

check: $(STAMP) ## Format, lint, types, import order.
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP) ## Measure what must be fast.
	$(BIN)/python -m bench

docs: $(STAMP) ## Check that the documents fit the code.
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/unit/test_docs.py

campaign-exact: $(STAMP) ## The long form of the exactness tests.
	UNBROKEN_CAMPAIGN=1 $(BIN)/python -m pytest $(PYTEST_ARGS) --timeout 600 tests/e2e/test_exact.py

campaigns: campaign-exact ## Every campaign: 15 demos, 60 kills of the example, 97 stop requests, a million-step journal; about an hour.
	$(BIN)/python -m pytest $(PYTEST_ARGS) --timeout 3600 -m slow

campaign-crash: $(STAMP) ## A writer of checkpoints is ended in some 2,900 ways (kills, power losses, failing disks and servers): nothing may be lost.
	$(BIN)/python -W ignore -m bench.crash > bench/results/crash.json.new || (cat bench/results/crash.json.new; exit 1)
	mv bench/results/crash.json.new bench/results/crash.json

fuzz: $(STAMP) ## The long form of the parsers' fuzz tests, about 20 minutes.
	UNBROKEN_FUZZ=60 $(BIN)/python -m pytest $(PYTEST_ARGS) --timeout 3600 tests/fuzz

bench-recovery: $(STAMP) ## A worker is killed: seconds to the next finished step, against torchrun with DCP.
	$(BIN)/python -W ignore -m bench.recovery > bench/results/recovery.json.new
	mv bench/results/recovery.json.new bench/results/recovery.json

bench-overhead: $(STAMP) ## What keeping a run costs, against plain training and torch's own checkpoints; leave the machine alone meanwhile.
	$(BIN)/python -W ignore -m bench.overhead --others > bench/results/overhead.json.new
	mv bench/results/overhead.json.new bench/results/overhead.json

bench-store: $(STAMP) ## Saving and loading 706 MB against the raw disk and others; then what histories of checkpoints take.
	$(BIN)/python -W ignore -m bench.store > bench/results/store.json.new
	mv bench/results/store.json.new bench/results/store.json
	$(BIN)/python -W ignore -m bench.history > bench/results/history.json.new
	mv bench/results/history.json.new bench/results/history.json

bench-scale: $(STAMP) ## 4,096 stand-in ranks on 512 nodes against an S3 server, and a folder of 10,000 checkpoints.
	$(BIN)/python -W ignore -m bench.scale > bench/results/scale.json.new
	mv bench/results/scale.json.new bench/results/scale.json

help: ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
