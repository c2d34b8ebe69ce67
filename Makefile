# SPDX-License-Identifier: Apache-2.0
# Two commands lead: `make demo` and `make test`. Each sets itself up, on a fresh clone with Python >= 3.11 and nothing else.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# The first of these that is Python 3.11 or later; `make PYTHON=... demo` names one outright.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
# Python compiles what is imported, once, and keeps it: tests start hundreds of processes that import torch, and to compile it again
# takes twice as long as to import it. Images of containers often set this variable.
unexport PYTHONDONTWRITEBYTECODE
# Of what is installed, what is imported is the smaller part. And the pip of a Python of 2023 takes a minute of a core to compare the
# names of 180,000 files with the tags that it supports, where the present one takes seconds: a new environment gets that one first.
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile

.PHONY: demo test test-all test-gpu check check-ruff check-types check-imports check-architecture fuzz clients newest wheel release bench clean

demo: $(VENV)/.bare
	@$(PY) scripts/demo.py

# Some minutes on two cores. `make test-all` adds clusters, grids, fuzz and soaks: tests/support/sweeps.py lists them.
test: $(VENV)/.dev
	@$(PY) scripts/run_tests.py --without-sweeps $(ARGS)

test-all: $(VENV)/.dev
	@$(PY) scripts/run_tests.py $(ARGS)

# Every test that needs a GPU, several at a time, and then those that take all of its memory; the last lines of each say what ran.
test-gpu: $(VENV)/.dev
	@nvidia-smi -L || { echo "make test-gpu needs an NVIDIA GPU and its driver: nvidia-smi lists none here"; exit 1; }
	@$(PY) -m pytest -q -p no:logging -n 4 -m "(gpu1 or gpu2 or gpu4) and not alone" $(ARGS) tests
	@$(PY) -m pytest -q -p no:logging -m "(gpu1 or gpu2 or gpu4) and alone" $(ARGS) tests

# Two at a time; each prints its lines when it ends.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 --output-sync=target check-types check-ruff check-imports check-architecture

check-ruff: $(VENV)/.dev
	@echo "== ruff" && $(VENV)/bin/ruff check --no-cache src tests scripts benchmarks && $(VENV)/bin/ruff format --check src tests scripts benchmarks

check-types: $(VENV)/.dev
	@echo "== mypy" && $(VENV)/bin/mypy

check-imports: $(VENV)/.dev
	@echo "== import-linter" && $(VENV)/bin/lint-imports --no-logo

check-architecture: $(VENV)/.dev
	@echo "== architecture" && $(PY) -m pytest -q -p no:logging tests/architecture

# Random schedules, requests and tokenizer folders, SECONDS each, from SEED on: it is printed, and again where a case fails.
fuzz: SECONDS ?= 600
fuzz: SEED := $(or $(SEED),$(shell date +%s))
# The limit of a test is for CI: of these, one runs for all of its seconds, and then its longest case.
fuzz: RANDOM := PHALANX_FUZZ_SECONDS=$(SECONDS) PHALANX_FUZZ_SEED=$(SEED) $(PY) -m pytest -q -s --timeout=$(shell echo $$(($(SECONDS) + 600)))
fuzz: $(VENV)/.dev
	@echo "== fuzz: $(SECONDS) s each from SEED=$(SEED)"
	@$(RANDOM) tests/engine/test_scheduler_fuzz.py tests/serve/test_app_fuzz.py tests/serve/structured_output/test_json_schema_fuzz.py
	@$(RANDOM) tests/config/test_model_fuzz.py tests/models/test_checkpoint_fuzz.py
	@$(RANDOM) -k random_folders tests/serve/test_tokenizer_folder.py
	@$(RANDOM) tests/serve/output_parsing/test_families_there_and_back.py
	@PHALANX_FUZZ_EXAMPLES=50 PHALANX_FUZZ_SEED=$(SEED) $(PY) -m pytest -q -s tests/serve/test_app_schemathesis.py
	@PHALANX_FUZZ_FAULTS=200 PHALANX_FUZZ_SEED=$(SEED) $(PY) -m pytest -q -s --timeout=7200 -k random_faults tests/executor/test_stuck_ranks.py
	@PHALANX_FUZZ_STEPS=500 $(PY) -m pytest -q --timeout=3600 tests/worker/test_memory_profile_variants.py
	@$(PY) -m benchmarks.engine.host_memory_soak --seed $(SEED) --minutes $$(( ($(SECONDS) + 59) / 60 ))
	@PHALANX_HOSTILE_SECONDS=60 $(PY) -m pytest -q -s tests/acceptance/test_hostile_host.py

# Real libraries and tools against a real server, each in an environment of its own; minutes, and not a part of CI.
clients: $(VENV)/.bare
	@$(PY) scripts/clients/run.py $(ARGS)

# The newest release of every dependency, also beyond the upper bounds, against the tests of what uses its private parts. Not in CI.
newest: $(VENV)/.dev
	@$(PY) scripts/newest.py $(ARGS)

wheel: $(VENV)/.dev
	@$(PY) scripts/wheel_check.py

# A tag, and below dist/ the wheel, an image recipe and notes, of the version in src/phalanx/version.py.
release: wheel
	@$(PY) scripts/release.py

bench: $(VENV)/.dev
	@$(PY) -m benchmarks.engine.throughput
	@$(PY) -m benchmarks.serve.overhead

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or later is needed (with venv); none was found. Name one: make PYTHON=/path/to/python ..."; exit 1; fi
	@echo "== set-up: a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip || echo "== set-up: goes on with $$($(PY) -m pip --version)"

$(VENV)/.bare: pyproject.toml | $(VENV)/bin/python
	@echo "== set-up: installing phalanx and what it needs (torch is the large part; minutes when nothing is cached)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "== set-up: installing phalanx with what its tests need (torch and triton are the large parts; minutes when nothing is cached)"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.bare $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
