# Two commands do everything on a fresh Debian machine with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet
FETCH  := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/qkscope fetch

.PHONY: setup gemma demo test browser lint bench calibrate docs clean

setup: $(STAMP)

# The stamp is written last, so that an interrupted install starts again instead of passing for a finished one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qkscope needs Python 3.11 or newer, and $(PYTHON) is older: install one and say 'make PYTHON=/path/to/python3 setup'." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: on Debian and Ubuntu, run 'apt-get install python3-venv', then make again." >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing qkscope and its pinned dependencies into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable '.[dev]'
	@$(FETCH) smollm2-135m
	@touch $@

# The second model, under terms of its own, which the command says.
gemma: setup
	@$(FETCH) gemma3-270m

demo: setup
	@$(BIN)/qkscope demo

test: setup
	@$(BIN)/python -m pytest

# A browser for the tests of the pages; without one they skip, and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 || { echo "Installing Chromium needs root: run 'sudo make browser'." >&2; exit 2; }; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

lint: setup
	@$(BIN)/ruff check src tests docs
	@$(BIN)/ruff format --check src tests docs
	@$(BIN)/mypy

bench: setup
	@$(BIN)/qkscope bench

# The slow check behind the figures in docs/calibration.md: false positives on pure noise, 2,000 seeds.
calibrate: setup
	@$(BIN)/python docs/calibration.py

docs: setup
	@$(PIP) --editable '.[dev,docs]'
	@$(BIN)/sphinx-build -W --keep-going -q docs docs/_build
	@echo "docs/_build/index.html"

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
