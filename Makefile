# Two commands do everything: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A package index or flags for torch alone, for example a CPU-only build:
#   make demo TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FLAGS ?=
STAMP  := $(VENV)/.installed

.PHONY: demo test check soak docs clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: LoKA needs Python >= 3.11, $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	    echo "hint: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

test: $(STAMP)  ## every test: floors, lint, types, docs, unit, integration
	$(BIN)/python -m pytest

check: $(STAMP)  ## the fast static checks alone
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

demo: $(STAMP)  ## the main job on real data
	$(BIN)/loka run dcnv2 --data adult -o .demo --overwrite

soak: $(STAMP)  ## long trials
	$(BIN)/python -m pytest -m soak --timeout 3600

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .demo .runs site
