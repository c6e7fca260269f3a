# Each target makes .venv once, with the versions of constraints.txt, and again when they change.
# PYTHON=... runs a target in an environment of yours instead.
PYTHON ?= .venv/bin/python
SYSTEM_PYTHON ?= python3
TESTS ?=
PYTEST_FLAGS ?=
SERVER_VERSIONS ?= 0.5.2 0.5.6 0.5.7rc2

NATIVE_SOURCES := $(shell find csrc tests/native \( -name '*.cpp' -o -name '*.hpp' \) 2>/dev/null)
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt lmcache_fast/_version.py $(filter csrc/%,$(NATIVE_SOURCES))
OWN_ENV := $(filter .venv/bin/python,$(PYTHON))
DEMO_ENV := $(if $(OWN_ENV),.venv/.demo)
DEV_ENV := $(if $(OWN_ENV),.venv/.dev)

.DEFAULT_GOAL := test
.PHONY: demo environment test lint docs peers interop cluster matrix soak fuzz bench wheel clean

demo: $(DEMO_ENV)
	$(PYTHON) -m lmcache_fast demo

environment: $(DEV_ENV)

test: $(DEV_ENV)
	$(PYTHON) -m pytest $(TESTS) $(PYTEST_FLAGS)

lint: $(DEV_ENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest lmcache_fast._native \
		--allowlist tests/stubtest_allowlist.txt --ignore-unused-allowlist
	$(dir $(PYTHON))clang-format --dry-run -Werror $(NATIVE_SOURCES)

# The documentation as a site in build/site. A link or an anchor that leads nowhere is an error.
docs: $(DEV_ENV)
	$(PYTHON) -m mkdocs build

# Environments with the real LMCache and vLLM, where tests/interop/peer.py keeps them.
peers:
	$(SYSTEM_PYTHON) tests/interop/peer.py $(SERVER_VERSIONS) vllm

# PART=shared_server runs the tests on the servers that they share, PART="not shared_server" the rest.
PART ?=
interop: $(DEV_ENV)
	$(PYTHON) tests/interop/peer.py $(SERVER_VERSIONS) vllm
	$(PYTHON) -m pytest tests/interop $(SERVER_VERSIONS:%=--server-version %) -m "$(PART)" $(PYTEST_FLAGS)

# A Ray cluster of three machines on this one, each with a real server and an engine.
cluster: $(DEV_ENV)
	$(PYTHON) tests/interop/peer.py 0.5.6
	$(PYTHON) -m pytest tests/cluster $(PYTEST_FLAGS)

matrix: $(DEV_ENV)
	$(PYTHON) -m tests.interop.matrix --write docs/compatibility.md

# Minutes of a full server that is killed, stopped and cleared under several clients.
MINUTES ?= 10
soak: $(DEV_ENV)
	$(PYTHON) -m tests.soak.run --minutes $(MINUTES)

fuzz: $(DEV_ENV)
	$(PYTHON) -m tests.fuzz.run --minutes $(MINUTES)

bench: $(DEV_ENV)
	mkdir -p bench/results
	$(PYTHON) -m pytest bench --timeout 0 --benchmark-json bench/results/groups.json $(PYTEST_FLAGS)
	$(PYTHON) -m bench.compare_upstream
	$(PYTHON) -m bench.draw

# What `pip install .` gives, without the source tree and what an editable install adds.
wheel: $(DEV_ENV)
	rm -rf build/wheel
	$(PYTHON) -m pip wheel -q --no-deps -w build/wheel .
	$(PYTHON) -m pip install -q --no-deps --target build/wheel/installed build/wheel/*.whl
	cd build/wheel/installed && $(abspath $(PYTHON)) -I -S -c "import sys; sys.path.insert(0, ''); \
		import lmcache_fast, lmcache_fast._native as native; \
		assert native.__version__ == lmcache_fast.__version__; print('wheel works:', native.__file__)"

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
