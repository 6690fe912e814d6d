# `make` lists the targets. Everything is installed into $(VENV); nothing outside this folder is changed.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PYTHON_SOURCES := src tests benchmarks scripts
SOURCES := $(shell git ls-files native src pyproject.toml CMakeLists.txt 2>/dev/null)

NIGHTLY := $(addprefix nightly-,shapes engine faults kill simulation contract http random cap others)

.DEFAULT_GOAL := help
.PHONY: help demo dist docs test unit one lint format native native-test nightly matrix soak bench clean $(NIGHTLY)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(STAMPS)/engine $(STAMPS)/package ## a real vLLM on CPU with a small model, cold against cached, in one table
	@$(VENV)/bin/lmcache demo

READY := $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools $(STAMPS)/docs $(STAMPS)/services
test: $(READY) lint ## every check: lint, types, C++ and Python tests, real vLLM; suites run side by side
	$(PY) scripts/run_tests.py

unit: native ## the quick tests that need no engine and start no server, on the sources of this tree
	PYTHONPATH=src $(PY) scripts/run_tests.py units

one: ## tests by path or by a part of their name, Python and C++ alike: make one T=a_full_disk
	@$(PY) scripts/one.py "$(T)"

lint: $(STAMPS)/tools src/lmcache/_native.pyi ## formatting, lint, types, layers, dead names, file sizes, locking, dependencies
	$(PY) -m ruff format --check $(PYTHON_SOURCES)
	$(PY) -m ruff check $(PYTHON_SOURCES)
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')
	$(PY) -m mypy
	PYTHONPATH=src $(VENV)/bin/lint-imports
	$(PY) -m vulture
	$(PY) scripts/check_file_sizes.py
	$(PY) scripts/check_thread_safety.py
	$(PY) scripts/check_dependencies.py

# The stub of the extension, for mypy; `make native` makes a newer one.
src/lmcache/_native.pyi: $(STAMPS)/package
	cp $(VENV)/lib/python3*/site-packages/lmcache/_native.pyi $@

format: $(STAMPS)/tools ## rewrites sources in the house format
	$(PY) -m ruff format $(PYTHON_SOURCES)
	$(PY) -m ruff check --fix-only --quiet $(PYTHON_SOURCES)
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cc' '*.h')

native: ## the extension and its stub, built in place for work on the sources (src/lmcache/_native*)
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(PY)) > /dev/null
	cmake --build build/dev
	cp --remove-destination build/dev/_native*.so build/dev/_native.pyi src/lmcache/

native-test: ## C++ tests: plain, with ASan and UBSan, with TSan
	@for kind in plain address,undefined thread; do \
	  sanitize=$$kind; [ $$kind = plain ] && sanitize=; \
	  folder=build/test-$${kind%%,*}; \
	  echo "C++ tests: $$kind"; \
	  cmake -S . -B $$folder -G Ninja -DLMCACHE_BUILD_BINDINGS=OFF -DLMCACHE_BUILD_TESTS=ON -DLMCACHE_SANITIZE=$$sanitize > /dev/null && \
	  cmake --build $$folder > $$folder/build.log || { tail -n 40 $$folder/build.log; exit 1; }; \
	  ctest --test-dir $$folder --output-on-failure --timeout 300 || exit 1; \
	done

nightly: $(READY) ## all that takes long, part by part, with a table of results at the end; PYTEST="-k ..." selects
	$(PY) scripts/nightly.py -- $(PYTEST)

nightly-shapes: ## every model shape with a real vLLM
nightly-engine: ## the other long tests with a real vLLM
nightly-faults: ## every medium under every fault, 200 power cuts
nightly-kill: ## 200 rounds of load, kill -9 and restart for everything that keeps objects; 300 stops at random moments
nightly-simulation: ## 100,000 steps of the index and its controllers, 50 runs of every shape of the connector, a million faults of a fleet's events
nightly-contract: ## 50,000 random operations an adapter
nightly-http: ## 300 requests for each operation over HTTP, from its OpenAPI document, 100 of a coordinator's; a million faulty requests, a million faulty messages of engines
nightly-random: ## the unit tests with a new seed
nightly-cap: ## 10 GB under a cap, 200,000 salts
nightly-others: ## slow tests that no other part has
$(NIGHTLY): nightly-%: $(READY)
	$(PY) scripts/nightly.py $* -- $(PYTEST)

VLLM ?=
matrix: $(READY) ## the connector with every version of vLLM, or VLLM="0.31.0 0.33.0"; writes the tested matrix of README and doctor
	$(PY) scripts/engine_matrix.py $(VLLM)

SGLANG := .venv-sglang
sglang: $(READY) $(STAMPS)/sglang ## a real SGLang on CPU, in an environment of its own: the same tokens computed and loaded
	$(SGLANG)/bin/python -m pip install --quiet .
	$(PY) -m pytest -s tests/hicache

SOAK ?= 7200
soak: $(READY) ## mixed traffic for two hours (SOAK=seconds), a quarter of it without vLLM: memory flat, nothing held at the end
	TEST_SOAK_SECONDS=$$(($(SOAK) / 4)) $(PY) -m pytest -s tests/process/test_soak.py
	TEST_SOAK_SECONDS=$$(($(SOAK) * 3 / 4)) $(PY) -m pytest -s tests/e2e/test_soak.py

bench: $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/services ## the measurements behind the README, about an hour
	$(PY) benchmarks/run.py

PYTHONS ?= $(PY)
dist: $(STAMPS)/dist ## source archive and wheels, tried in empty environments, into dist/; PYTHONS="python3.10 python3.12"
	$(PY) scripts/make_dist.py $(PYTHONS)

docs: $(STAMPS)/docs ## the documentation as a site in build/site; a broken link ends it
	$(VENV)/bin/zensical build --strict --config-file mkdocs.yml

clean: ## removes builds and the environment
	rm -rf build dist $(VENV) $(SGLANG) src/lmcache/_native*

$(PY):
	$(PYTHON) -m venv $(VENV)

# vLLM for CPU, its requirements and what makes a small model.
$(STAMPS)/engine: scripts/install_cpu_engine.py | $(PY)
	$(PY) scripts/install_cpu_engine.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/tools: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet $$($(PY) scripts/list_extras.py test lint curve dashboard) "scikit-build-core>=0.10,<1" "nanobind>=2.4,<3"
	@mkdir -p $(@D) && touch $@

$(STAMPS)/dist: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet $$($(PY) scripts/list_extras.py dist)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/docs: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet $$($(PY) scripts/list_extras.py docs)
	@mkdir -p $(@D) && touch $@

# What the tests of remote tiers run against.
$(STAMPS)/services: scripts/install_services.py $(STAMPS)/tools | $(PY)
	$(PY) scripts/install_services.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/sglang: scripts/install_sglang.py
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python scripts/install_sglang.py
	@mkdir -p $(@D) && touch $@

# The engine comes first, so that it and not this package decides the versions of what both need.
$(STAMPS)/package: $(SOURCES) $(STAMPS)/engine
	$(PY) -m pip install --quiet .
	@mkdir -p $(@D) && touch $@
