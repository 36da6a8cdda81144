# Two commands for newcomers: `make demo` and `make test`. Both make .venv, build the core in place and install the
# pinned dependencies first. With PYTHON=/path/to/python given, that interpreter is used as it is (so does .ci/run,
# where a wheel is installed in it).

VENV := .venv
ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.built
endif

SYSTEM_PYTHON ?= $(shell command -v python3.11 || command -v python3)
CORE := $(wildcard embcache/_core/*.pyx embcache/_core/*.pxd embcache/_core/include/*.h)

# Safe path: without it `python -m pytest` would put this folder first on sys.path and shadow an installed wheel.
ISOLATED := PYTHONSAFEPATH=1 $(PYTHON)

# Options: make test PYTEST_ARGS="-k planner", make demo DEMO_ARGS="--batch-size 512"
PYTEST_ARGS ?=
DEMO_ARGS ?=
SOAK ?= 20

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lint sanitize races bench soak clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 16

demo: $(READY)  ## train on real flights with 10 % of the rows in HBM, compare with everything resident and with stock PyTorch
	$(PYTHON) examples/flights.py $(DEMO_ARGS)

test: $(READY)  ## the whole test suite
	$(ISOLATED) -m pytest $(PYTEST_ARGS)

check: lint sanitize  ## lint, types, and the core's tests under the address and undefined-behaviour sanitizers

lint: $(READY)  ## ruff, mypy, cython-lint
	$(PYTHON) -m ruff check --output-format=concise .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	PATH="$(abspath $(dir $(PYTHON))):$$PATH" cython-lint embcache/_core

sanitize: $(READY)  ## the torch-free tests on a checked core with ASan and UBSan
	PYTHON=$(PYTHON) tools/sanitize.sh

races: $(READY)  ## the tests of threads on a checked core with TSan
	PYTHON=$(PYTHON) tools/sanitize.sh thread

bench: $(READY)  ## our figures and peers' in the same run; writes bench/report.md (with PYTEST_ARGS: below build/)
	rm -f build/bench/outcomes.jsonl
	$(ISOLATED) -m pytest bench --benchmark-only --bench-outcomes build/bench/outcomes.jsonl $(PYTEST_ARGS)
	$(PYTHON) bench/report.py build/bench/outcomes.jsonl --to $(if $(PYTEST_ARGS),build/bench/report.md,bench/report.md)

soak: $(READY)  ## state machines, promises, kills, power cuts and damage on new random examples, SOAK times as many (20; kills: 2,700)
	EMBCACHE_SOAK=$(SOAK) $(ISOLATED) -m pytest tests/promises tests/property tests/crash tests/distributed tests/torchrec_face/test_kills.py --timeout=36000 $(PYTEST_ARGS)

clean:  ## remove everything that was built, the virtual environment included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find embcache tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
	find embcache -name '*.so' -delete

$(VENV)/.created:
	$(SYSTEM_PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt requirements-torchrec.txt setup.py | $(VENV)/.created
	@echo "installing pinned versions into $(VENV) and building the core; this takes minutes, once"
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements-torchrec.txt
	touch $@

# The editable install has built everything that was there; what changed since is built in place.
$(VENV)/.built: $(VENV)/.installed $(CORE)
	@if [ -n "$$(find $(CORE) -newer $(VENV)/.installed)" ]; then $(VENV)/bin/python setup.py --quiet build_ext --inplace; fi
	touch $@
