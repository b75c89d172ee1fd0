# Targets for people and for CI. The environment lives in .venv and is rebuilt when pyproject.toml changes.
#   make test PYTHON=python3.11 VENV=.venv-3.11    another interpreter, beside the first
#   make test TESTS=tests/models                   a part of the tests

VENV ?= .venv
TESTS ?=
# A candidate must run: a pyenv shim of a version that is not activated exists, but fails.
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# The major CUDA version that the NVIDIA driver supports, empty without a driver; the extra is named after it.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA),cuda$(shell [ $(CUDA) -ge 13 ] && echo 13 || echo 12))
# The oracle of the parity tests. `make test TORCH=` does without it: the parity tests are skipped. On a machine without
# a GPU, TORCH="torch==2.13.0 --index-url ..." with an index of CPU builds saves 4 GB.
TORCH ?= torch==2.13.0

# A test that crashes its process, or takes ten minutes, ends the run and is named: pytest-xdist 3.8 may wait for ever for
# the process that takes over.
WATCHDOG = --max-worker-restart=0 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types check docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.runtime ## let the bundled model write some Python
	$(VENV)/bin/mpjax generate --precision W4A16KV8 --temperature 0.6 --top-p 0.9 --seed 1 --echo "def read_lines(path):"

test: $(VENV)/.development ## run the tests (GPU tests too, where there is a CUDA GPU)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile $(WATCHDOG) $(TESTS)

lint: $(VENV)/.development ## check format and style
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

format: $(VENV)/.development ## rewrite the files in the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

types: $(VENV)/.development ## check the types
	$(VENV)/bin/mypy

check: lint types test ## lint, types and test

docs: $(VENV)/.created ## build the site in build/site; warnings are errors
	@$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html"

clean: ## remove environments, caches and build products
	rm -rf .venv* build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a user installs.
$(VENV)/.runtime: $(VENV)/.created
	@echo "Installing mpjax$(EXTRA:%=[%]) into $(VENV). The first time takes a minute or two."
	@$(PIP) --editable ".$(EXTRA:%=[%])"
	@touch $@

# What a contributor installs on top.
$(VENV)/.development: $(VENV)/.created
	@echo "Installing mpjax$(EXTRA:%=[%]), torch and the test tools into $(VENV). The first time takes some minutes."
	@$(PIP) --editable ".[test,dev,eval$(EXTRA:%=,%)]"
	@[ -z "$(TORCH)" ] || $(PIP) $(TORCH) "accelerate>=1.0"
	@touch $@ $(VENV)/.runtime

$(VENV)/.created: pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "mpjax needs Python 3.11 or newer, and none was found: install one, or name it with 'make PYTHON=/path/to/python'." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)."
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python $(PYTHON) $(VENV); \
	elif command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) $(VENV); \
	else echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv), or virtualenv, or uv." >&2; exit 1; fi
	@touch $@
