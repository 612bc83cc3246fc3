# make demo    install into .venv and train the model that ships with jetrl (no GPU needed)
# make test    install what the tests need and run them
# make check   ruff, pyright and the layout rules
# make lock    pin the newest versions that pyproject.toml allows into requirements/
# make compare train the demo model under three flows with three seeds each (about half an hour on 2 cores)
# make clean   remove .venv, build products and caches (runs/ stays)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TRITON ?= 3.7.1
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# A stamp is newer than the files it was made from as long as the environment matches them.
DEMO_STAMP := $(VENV)/.jetrl-demo
DEV_STAMP := $(VENV)/.jetrl-dev
LOCK_ENV := build/lock

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check compare lock clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(DEMO_STAMP)
	$(BIN)/jetrl train configs/demo.yaml

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --level error --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_layout.py

# A run that is already there is kept, so that the comparison can be stopped and gone on with.
compare: $(DEMO_STAMP)
	for flow in bf16 fp8 fp8_rollout; do for seed in 0 1 2; do \
		run=runs/compare/$$flow-$$seed; \
		test -f $$run/report.html || $(BIN)/jetrl train configs/compare/$$flow.yaml seed=$$seed folder=$$run || exit 1; \
	done; done
	$(BIN)/jetrl report runs/compare/*-? --out runs/compare/report.html

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no '$(PYTHON)' here. Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1); jetrl needs Python 3.11 or later."; \
		echo "Name another one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# setuptools is pinned in the lock, so jetrl itself is built without fetching anything.
$(DEMO_STAMP): requirements/cpu.lock pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (about two minutes the first time) ..."
	$(PIP) install -q -r requirements/cpu.lock
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(DEV_STAMP): requirements/dev.lock $(DEMO_STAMP) | $(BIN)/python
	$(PIP) install -q -r requirements/dev.lock
	@touch $@

# A CUDA build of torch brings its own libraries and Triton; they are torch's to choose, so no lock names the libraries, and
# cpu.lock no Triton. The tests need it beside a CPU build too: dev.lock names the version that the CUDA build would choose.
TRITON_ON = ; sys_platform == 'linux' and platform_machine == 'x86_64'
FREEZE = $(LOCK_ENV)/bin/python -m pip freeze --all --exclude jetrl --exclude pip \
	| sed -E -e 's/^(torch==[0-9.]+)\+.*/\1/' -e '/^(nvidia|cuda)/d' -e "s/^triton==.*/&$(TRITON_ON)/" | LC_ALL=C sort -f

lock:
	rm -rf build
	$(PYTHON) -m venv $(LOCK_ENV)
	$(LOCK_ENV)/bin/python -m pip install -q torch==$(TORCH) .
	{ echo "# What 'make demo' installs. Made by 'make lock'; do not edit."; $(FREEZE) | sed '/^triton/d'; } \
		> requirements/cpu.lock
	$(LOCK_ENV)/bin/python -m pip install -q "triton==$(TRITON)$(TRITON_ON)" '.[dev]'
	{ echo "# What 'make test' and 'make check' add to it. Made by 'make lock'; do not edit."; echo "-r cpu.lock"; \
		$(FREEZE) | grep -vxFf requirements/cpu.lock; } > requirements/dev.lock
	rm -rf build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
