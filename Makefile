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

.PHONY: demo test check check-ruff check-types check-imports check-architecture fuzz clients wheel bench clean

demo: $(VENV)/.bare
	@$(PY) scripts/demo.py

test: $(VENV)/.dev
	@$(PY) scripts/run_tests.py $(ARGS)

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

# Random schedules and requests, SECONDS each, from SEED on: it is printed, and again where a case fails.
fuzz: SECONDS ?= 600
fuzz: SEED := $(or $(SEED),$(shell date +%s))
fuzz: $(VENV)/.dev
	@echo "== fuzz: $(SECONDS) s each from SEED=$(SEED)"
	@PHALANX_FUZZ_SECONDS=$(SECONDS) PHALANX_FUZZ_SEED=$(SEED) $(PY) -m pytest -q -s tests/engine/test_scheduler_fuzz.py tests/serve/test_app_fuzz.py
	@PHALANX_FUZZ_EXAMPLES=50 PHALANX_FUZZ_SEED=$(SEED) $(PY) -m pytest -q -s tests/serve/test_app_schemathesis.py
	@PHALANX_FUZZ_STEPS=500 $(PY) -m pytest -q --timeout=3600 tests/worker/test_memory_profile_variants.py
	@PHALANX_HOSTILE_SECONDS=60 $(PY) -m pytest -q -s tests/acceptance/test_hostile_host.py

# Real libraries and tools against a real server, each in an environment of its own; minutes, and not a part of CI.
clients: $(VENV)/.bare
	@$(PY) scripts/clients/run.py $(ARGS)

wheel: $(VENV)/.dev
	@$(PY) scripts/wheel_check.py

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
