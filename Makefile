# Everything happens in .venv, which `make install` makes; PYTHON chooses the interpreter it is made from.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Test processes; each takes one torch thread, so two fit two cores.
JOBS   ?= 2
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart kernels style quality test test-gpu sanitize coverage soak fuzz mutants lock audit bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-11s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST) \
	  | if [ -t 1 ] && [ -z "$$NO_COLOR" ]; then cat; else sed 's/\x1b\[[0-9;]*m//g'; fi

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"error: omniw4 needs Python 3.11 or newer, found {v.major}.{v.minor}\n\nhint: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements-ci.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
endif
	@touch $@

install: $(STAMP) ## virtual environment in .venv with the pinned versions (LOCKED=1: and hashes, on the platform of CI)

quickstart: $(STAMP) ## a real model, calibrated, quantized, repacked, verified, benched, reported (FULL=1: the documented figures)
	@$(BIN)/python scripts/quickstart.py $(if $(FULL),--full) $(if $(SHORT),--short)

kernels: $(STAMP) ## compile the CUDA kernels (OMNIW4_CUDA_ARCHS='80 86 89 90a'); needs no GPU
	@command -v nvcc >/dev/null || test -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nvcc]'
	$(BIN)/python scripts/build_kernels.py

style: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@find kernels -regex '.*\.\(cu\|cuh\|h\|cpp\)' 2>/dev/null | xargs -r $(BIN)/clang-format -i

quality: $(STAMP) ## linter, formatter, type checker: reports, changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@find kernels -regex '.*\.\(cu\|cuh\|h\|cpp\)' 2>/dev/null | xargs -r $(BIN)/clang-format --dry-run -Werror

COVERAGE_FLAGS = --cov=omniw4 --cov-report=term:skip-covered --cov-fail-under=90
test: $(STAMP) ## the tests; those marked gpu are skipped where there is no GPU (COVERAGE=1: fails below 90 % of the lines)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(if $(COVERAGE),$(COVERAGE_FLAGS))

test-gpu: $(STAMP) ## the tests marked gpu, one process; fails where there is no GPU
	OMNIW4_REQUIRE_GPU=1 $(BIN)/python -m pytest -q -m gpu

coverage: ## the tests, and the share of lines they run; fails below 90 %
	$(MAKE) test COVERAGE=1

soak: $(STAMP) ## hours: 200 kills of each verb, 10,000 steps of linears and engines, every property fifty times as often
	$(BIN)/python scripts/soak.py kills --trials 200
	$(BIN)/python scripts/soak.py steps --steps 10000
	$(BIN)/python scripts/large_model.py --tiny
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -n $(JOBS) tests/property

fuzz: $(STAMP) ## coverage-guided fuzzing of the checkpoint reader (SECONDS=600)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python scripts/fuzz_checkpoint.py --seconds $(or $(SECONDS),600)

mutants: $(STAMP) ## an hour: each small change of int4, validator and layouts must fail a test; prints the survivors
	$(BIN)/python scripts/mutants.py

lock: $(STAMP) ## requirements-ci.txt anew from constraints.txt
	$(BIN)/python scripts/lock.py

audit: $(STAMP) ## what is installed against lock and hashes; known advisories where pip-audit is there
	$(BIN)/python scripts/audit.py --sbom $(VENV)/sbom.json

sanitize: $(STAMP) ## compute-sanitizer over a small set of kernel calls (needs a GPU)
	$(BIN)/python scripts/sanitize.py

bench: $(STAMP) ## time the ops of every shape of the model against torch
	$(BIN)/omniw4 bench --what ops

docs: $(STAMP) ## regenerate the pages that are made from code
	$(BIN)/python scripts/make_cli_docs.py
	$(BIN)/python scripts/make_pictures.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist quickstart .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
