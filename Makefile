# `make verify` and `make test` work on a machine with nothing but Python 3.11 or newer and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# One more process than there are cores: each waits at times, for a compiler or for its own child.
JOBS   ?= $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores + 1)))

.PHONY: verify test lint docs clean

verify: $(STAMP)  ## compare every backend that runs here, checkpoint by checkpoint
	$(BIN)/r18 verify

# With bytecode, whatever the environment says: hundreds of processes import the same modules.
test: $(STAMP)  ## pass the tests, in one process more than there are cores
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Installed once, and again only when what is to be installed changes.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
