# Two commands do everything on a fresh Debian machine with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Every package by version and hash (.ci/hashes wrote these). Of torch there are wheels with CUDA and without: the one that
# pip takes here is taken, if its hash is known; what it asks for besides, it pins itself.
HASHED := $(BIN)/pip install --quiet --no-deps --require-hashes --requirement
PIP    := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --no-build-isolation
FETCH  := $(BIN)/qkscope fetch
CODE   := src tests docs papers bench conftest.py

.PHONY: setup gemma demo test test-papers coverage browser lint bench calibrate docs clean

setup: $(STAMP)

# The stamp is written last, so that an interrupted install starts again instead of passing for a finished one.
$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt requirements.txt requirements-torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qkscope needs Python 3.11 or newer, and $(PYTHON) is older: install one and say 'make PYTHON=/path/to/python3 setup'." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: on Debian and Ubuntu, run 'apt-get install python3-venv', then make again." >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing qkscope and its pinned dependencies into $(VENV) (a few minutes the first time) ..."
	@$(HASHED) requirements.txt
	@$(BIN)/pip download --quiet --no-deps --dest $(VENV)/torch "$$(grep -o '^torch==[^ ]*' requirements-torch.txt)"
	@$(HASHED) requirements-torch.txt --no-index --find-links $(VENV)/torch
	@rm -rf $(VENV)/torch
	@$(PIP) --editable '.[dev]' --editable ./papers
	@$(FETCH) smollm2-135m
	@touch $@

# The second model, under terms of its own, which the command says.
gemma: setup
	@$(FETCH) gemma3-270m

demo: setup
	@$(BIN)/qkscope demo

test: browser
	@$(BIN)/python -m pytest tests

test-papers: setup
	@$(BIN)/python -m pytest papers/tests bench/tests

# Which lines no test runs; slower than the tests alone. Processes that tests kill say nothing of theirs.
coverage: browser
	@$(BIN)/python -m pytest --cov=qkscope --cov=qkscope_papers --cov=qkscope_bench --cov-report=term:skip-covered tests papers/tests bench/tests

# A browser for the tests of the pages: on Debian as root it is installed; elsewhere a Chrome that is there is taken, or a
# line says which tests are left out without one.
browser: setup
	@$(BIN)/python tests/helpers/browser.py

lint: setup
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy

bench: setup
	@$(BIN)/qkscope bench

# The slow check behind the figures in bench/docs/calibration.md: false positives on pure noise, 2,000 seeds.
calibrate: setup
	@$(BIN)/python bench/calibration.py

docs: setup
	@$(HASHED) requirements-docs.txt
	@$(PIP) --editable '.[dev,docs]'
	@$(BIN)/sphinx-build -W --keep-going -q -c docs . docs/_build
	@echo "docs/_build/docs/index.html"

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
