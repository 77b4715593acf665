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
CODE   := src tests docs papers conftest.py

.PHONY: setup gemma demo gallery test test-papers coverage browser lint bench calibrate docs clean

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

# One offline site to look at: six prompts with their reasons, a small atlas, tasks, and figures of the papers. Each run is
# made once, so that a stopped one goes on; Gemma's are left out without it.
SHOWN   := runs/gallery
PROMPTS := names-heads names boxes code capital potter position
GEMMA   := $(addprefix $(SHOWN)/,$(addsuffix /results.json,gemma-heads gemma-why))
RUNS    := $(addprefix $(SHOWN)/,$(addsuffix /results.json,$(PROMPTS) atlas demo trace nano-heads nano-fit nano-sparsity lee2026/fig4 franco2026/fig2))
BOXES   := hat: O\njam: Z\ncat: B\njam:
NAMES   := When Mary and John went to the store, John gave a drink to
AREA    := def area(width, height):\n    return width *
ROME    := The capital of France is Paris. The capital of Italy is
TRAIN   := Harry Potter went to school. On the train, Harry
TEA     := Anna likes tea and Tom likes coffee. So Anna drinks
PLACE    = $(@D)
OR_ELSE := false

gallery: $(RUNS) $(GEMMA)
	@$(BIN)/qkscope gallery $(addprefix $(SHOWN)/,$(PROMPTS) atlas demo) $(SHOWN) --out runs/site

$(SHOWN)/demo/results.json:          VERB = demo
$(SHOWN)/names-heads/results.json:   VERB = why '$(NAMES)' --versus ' John'
$(SHOWN)/names/results.json:         VERB = why '$(NAMES)' --versus ' John' --head L23H0
$(SHOWN)/boxes/results.json:         VERB = why '$(BOXES)' --head L18H6
$(SHOWN)/code/results.json:          VERB = why '$(AREA)' --head L23H3
$(SHOWN)/capital/results.json:       VERB = why '$(ROME)' --head L20H5
$(SHOWN)/potter/results.json:        VERB = why '$(TRAIN)' --head L24H4
$(SHOWN)/position/results.json:      VERB = why '$(TEA)' --head L11H1
$(SHOWN)/atlas/results.json:         VERB = atlas --heads L11H1,L16H0,L17H4,L18H6,L20H0,L23H0 -n 4 --test 4
$(SHOWN)/trace/results.json:         VERB = trace binding --heads L18H6 -n 16 --no-whole
$(SHOWN)/gemma-heads/results.json:   VERB = heads ioi -n 32 --model gemma3-270m
$(SHOWN)/gemma-why/results.json:     VERB = why '$(NAMES)' --head L12H1 --model gemma3-270m
$(SHOWN)/nano-heads/results.json:    VERB = heads binding --form sentence -n 64 --model nano:mixed
$(SHOWN)/nano-fit/results.json:      VERB = decompose binding --form sentence --heads L1H0,L1H1 -n 64 --model nano:mixed
$(SHOWN)/nano-sparsity/results.json: VERB = sparsity ioi --revisions all -n 32 --model nano:mixed
$(SHOWN)/lee2026/fig4/results.json:    VERB = reproduce lee2026 fig4 --preset smoke
$(SHOWN)/franco2026/fig2/results.json: VERB = reproduce franco2026 fig2 --preset smoke
$(SHOWN)/lee2026/% $(SHOWN)/franco2026/%: PLACE = $(SHOWN)
$(GEMMA): OR_ELSE := echo "So it is left out; 'make gemma' installs the model."

$(RUNS) $(GEMMA): | setup
	@printf '%s\n' "qkscope $(VERB)"
	@$(BIN)/qkscope $(VERB) --out $(PLACE) >/dev/null || $(OR_ELSE)

test: setup
	@$(BIN)/python -m pytest tests

test-papers: setup
	@$(BIN)/python -m pytest papers/tests

# Which lines no test runs; slower than the tests alone. Processes that tests kill say nothing of theirs.
coverage: setup
	@$(BIN)/python -m pytest --cov=qkscope --cov=qkscope_papers --cov-report=term:skip-covered tests papers/tests

# A browser for the tests of the pages; without one they skip, and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 || { echo "Installing Chromium needs root: run 'sudo make browser'." >&2; exit 2; }; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

lint: setup
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy

bench: setup
	@$(BIN)/qkscope bench

# The slow check behind the figures in papers/docs/calibration.md: false positives on pure noise, 2,000 seeds.
calibrate: setup
	@$(BIN)/python papers/scripts/calibration.py

docs: setup
	@$(HASHED) requirements-docs.txt
	@$(PIP) --editable '.[dev,docs]'
	@$(BIN)/sphinx-build -W --keep-going -q -c docs . docs/_build
	@echo "docs/_build/docs/index.html"

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
