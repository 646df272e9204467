# Two commands do everything: `make demo` and `make test`. Both build .venv first.
# Every path is relative and every program is run as `python -m` or from .venv, so the checkout may lie
# anywhere, also under a name with spaces.

# Any Python >= 3.11 that can make an environment; 3.11, which the versions are pinned for, comes first.
PYTHON_CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
  "$$python" -c '$(PYTHON_CHECK)' 2>/dev/null && { echo "$$python"; break; }; done)
VENV   := .venv
BIN    := $(VENV)/bin
# A package index or flags for torch alone, for example a CPU-only build:
#   make demo TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FLAGS ?=
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# CUDA builds of torch bring the Triton they need. A CPU build brings none, and the tests run LoKA's Triton
# kernels through Triton's interpreter.
TRITON := triton==3.6.0
# Threads that wait sleep: spinning ones take the cores from each other where other programs run too, which
# made the demo 20 times slower on two busy cores. No number depends on it.
export OMP_WAIT_POLICY ?= PASSIVE
# Holds the folder it was made in: an environment that was moved or half made is made anew.
STAMP  := $(VENV)/.installed
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
STALE := stale
endif

.PHONY: demo test check soak docs clean stale
.DEFAULT_GOAL := test

stale:

$(STAMP): pyproject.toml constraints.txt $(STALE)
	@"$(PYTHON)" -c '$(PYTHON_CHECK)' 2>/dev/null || { \
	  echo "error: LoKA needs Python >= 3.11 with its venv module;" \
	    "$(or $(PYTHON),python3) is $$("$(or $(PYTHON),python3)" --version 2>&1)" >&2; \
	  echo >&2; \
	  echo "hint: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11 (on Debian: apt install python3-venv)" >&2; \
	  exit 2; }
	@echo "setting up $(VENV) with $$("$(PYTHON)" --version); the first time takes some minutes" >&2
	@rm -f $@
	"$(PYTHON)" -m venv $(if $(STALE),--clear) $(VENV)
	$(PIP) install $(TORCH_FLAGS) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e ".[dev]"
	@"$(BIN)/python" -c 'import triton' 2>/dev/null || { echo "$(PIP) install $(TRITON)"; $(PIP) install $(TRITON); }
	@printf '%s\n' "$(CURDIR)" > $@

test: $(STAMP)  ## every test: floors, lint, types, docs, unit, integration
	$(BIN)/python -m pytest

check: $(STAMP)  ## the fast static checks alone
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

demo: $(STAMP)  ## the main job on real data
	$(BIN)/loka run dcnv2 --data adult --batch-size 512 --epochs 4 -o .demo --overwrite

soak: $(STAMP)  ## long trials
	$(BIN)/python -m pytest -m soak --timeout 3600

docs: $(STAMP)  ## the documentation, into site/
	$(BIN)/python -m mkdocs build --strict

clean:  ## everything that the targets above made
	rm -rf $(VENV) .demo .runs site
