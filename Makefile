# Everything a fresh clone needs, behind two commands: `make serve` and `make test`.
#
#   pyproject.toml, constraints.txt --> .venv/.installed --> .venv/.model --> serve, setup
#                                       the package alone \--> .venv/.tools --> test, check, format
#                                                               what tests and checks need beside it
#
# A stamp is renamed into place as the last act of its recipe. `.venv/.installing` is what an
# interrupted installation leaves behind: finding it, the next run starts from an empty .venv.

VENV  := .venv
BIN   := $(VENV)/bin
JOBS  ?= 2
BOUNDS ?= lowest
ARGS  ?=

IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for python in python3 python python3.11 python3.12 python3.13 python3.14; do \
	$$python $(IS_NEW_ENOUGH) 2> /dev/null && echo $$python && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # without kept bytecode, each process of pytest rewrites its plugins anew

.DEFAULT_GOAL := help
SOAK_MINUTES ?= 60
NIGHTLY_REQUESTS ?= 1000000

.PHONY: help setup serve test test-slow test-clients soak nightly check lint format bounds audit clean distclean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.model  ## make .venv, install the package with pinned dependencies, fetch the default model
	@echo "ready: $(BIN)/infer --help"

serve: $(VENV)/.model  ## serve the default model on 127.0.0.1:8000; ARGS="MODEL --port 9000" for another
	@$(BIN)/infer serve $(ARGS)

test: $(VENV)/.tools  ## run every test that this machine can run, without the slow ones
	@$(BIN)/infer fetch > /dev/null || echo "the default model is not here: tests that need it are skipped" >&2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(VENV)/.tools  ## run the slow tests: long random runs, every combination, every compiler, fresh examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or hypothesis" \
		--hypothesis-profile=thorough --ignore tests/clients

test-clients: $(VENV)/.tools  ## run real clients of other projects against a server; needs package registries
	@$(BIN)/infer fetch > /dev/null
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients $(ARGS)

soak: $(VENV)/.tools  ## an hour of mixed load on a server whose engine is killed now and then; SOAK_MINUTES=5 for less
	$(BIN)/python -m benchmarks.soak_server --minutes $(SOAK_MINUTES) $(ARGS)

nightly: $(VENV)/.tools  ## a million random requests through the scheduler; NIGHTLY_REQUESTS=100000 for fewer
	$(BIN)/python -m tests.stress.nightly --requests $(NIGHTLY_REQUESTS) --jobs $(JOBS) $(ARGS)

check: $(VENV)/.tools  ## formatting, lint, types, docs and unit tests: what a commit must pass
	@scripts/check

lint: $(VENV)/.tools  ## formatting, lint, types and docs, without running a test
	@scripts/check --static

format: $(VENV)/.tools  ## format the code, apply safe lint fixes and regenerate the docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/docs.py

bounds: $(VENV)/.tools  ## try the lowest versions that pyproject.toml allows; BOUNDS=newest for the newest
	$(BIN)/python scripts/bounds.py $(BOUNDS)

audit: $(VENV)/.installed  ## look for known weaknesses of the pinned dependencies; needs the network
	@$(BIN)/python scripts/audit.py

clean:  ## remove caches and build outputs
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove .venv; the next run sets everything up again
	rm -rf $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	@if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version > /dev/null 2>&1; then \
		test -n "$(PYTHON)" && $(PYTHON) $(IS_NEW_ENOUGH) || { \
			echo "python 3.11 or newer is needed, found: $(or $(PYTHON),none on the PATH);" \
			"install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }; \
		echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.installing
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable .
	@mv $(VENV)/.installing $@

$(VENV)/.tools: $(VENV)/.installed
	@mv $(VENV)/.installed $(VENV)/.installing  # and back, as old as it was: the model need not be fetched again
	@trap 'exit 130' INT; \
		$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]' \
		|| { mv $(VENV)/.installing $(VENV)/.installed; exit 1; }  # refused, not interrupted: serving still works
	@mv $(VENV)/.installing $(VENV)/.installed
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	@$(BIN)/infer fetch
	@$(BIN)/infer doctor > /dev/null  # builds the C kernels for this machine, if it has a compiler
	@touch $@
