# Each target makes .venv once, with the versions of constraints.txt, and again when they change.
# PYTHON=... runs a target in an environment of yours instead.
PYTHON ?= .venv/bin/python
SYSTEM_PYTHON ?= python3
TESTS ?=
PYTEST_FLAGS ?=
SERVER_VERSIONS ?= 0.5.2 0.5.6 0.5.7rc2

NATIVE_SOURCES := $(shell find csrc tests/native -name '*.cpp' -o -name '*.hpp')
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt lmcache_fast/_version.py $(filter csrc/%,$(NATIVE_SOURCES))
OWN_ENV := $(filter .venv/bin/python,$(PYTHON))
DEMO_ENV := $(if $(OWN_ENV),.venv/.demo)
DEV_ENV := $(if $(OWN_ENV),.venv/.dev)

.PHONY: demo test lint interop bench clean

demo: $(DEMO_ENV)
	$(PYTHON) -m lmcache_fast demo

test: $(DEV_ENV)
	$(PYTHON) -m pytest $(TESTS) $(PYTEST_FLAGS)

lint: $(DEV_ENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest lmcache_fast._native
	$(dir $(PYTHON))clang-format --dry-run -Werror $(NATIVE_SOURCES)

interop: $(DEV_ENV)
	$(PYTHON) tests/interop/peer.py $(SERVER_VERSIONS) vllm
	$(PYTHON) -m pytest tests/interop $(SERVER_VERSIONS:%=--server-version %) $(PYTEST_FLAGS)

bench: $(DEV_ENV)
	$(PYTHON) -m lmcache_fast bench

native native-test: $(DEV_ENV)

include native.mk

.venv/bin/python:
	$(SYSTEM_PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python $(BUILD_INPUTS)
	.venv/bin/python -m pip install -q -c constraints.txt -e ".[demo]"
	touch $@

.venv/.dev: .venv/bin/python $(BUILD_INPUTS)
	.venv/bin/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@ .venv/.demo

clean:
	rm -rf .venv build
