# Needs nothing but Python 3.10 or newer (3.11 is what the pins are for) with its venv module.
#   make setup   a virtual environment in .venv with everything in it, pinned in constraints.txt
#   make test    the whole test suite, then the linters
#   make test-megatron   the Megatron tests on every version that they know, not just two
#   make demo    train, kill the trainer in the middle of a save, resume, compare every loss
#   make bench   how long saves take here
#   make soak    hundreds of saves under memory limits, next to a neighbour, and the same limits for other ways to save
#   make bench-megatron   stock megatron-core saves against the same saves with the engine
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup test test-megatron lint demo bench bench-megatron soak clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# The stamp is written last, so that an interrupted installation is taken up again by the next make.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import pip' >/dev/null 2>&1; then \
	    rm -rf $(VENV); \
	    for python in "$(PYTHON)" python3 python; do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	            echo "$(VENV): made with $$("$$python" -V)"; \
	            "$$python" -m venv $(VENV) && exit 0; rm -rf $(VENV); \
	        fi; \
	    done; \
	    echo "no Python >= 3.10 with the venv module found; say which with: make PYTHON=/path/to/python" >&2; exit 1; \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

test: setup
	$(BIN)/python -m pytest
	$(MAKE) --no-print-directory lint

test-megatron: setup
	CKPT_ENGINE_MEGATRON=all $(BIN)/python -m pytest tests/test_megatron_*.py

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/python -m benchmarks.save

bench-megatron: setup
	$(BIN)/python -m benchmarks.megatron

soak: setup
	$(BIN)/python -m tests.soak --out build/soak

clean:
	rm -rf $(VENV) build dist demo-run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
