# `make` lists the targets. Everything is installed into $(VENV); nothing outside this folder is changed.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
SOURCES := $(shell git ls-files native src pyproject.toml CMakeLists.txt 2>/dev/null)

NIGHTLY := $(addprefix nightly-,shapes engine faults kill simulation contract cap others)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types native native-test python-test nightly soak bench clean $(NIGHTLY)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(STAMPS)/engine $(STAMPS)/package ## a real vLLM on CPU with a small model, cold against cached, in one table
	@$(VENV)/bin/lmcache demo

test: $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools lint native-test python-test ## every check: lint, types, C++ and Python tests, real vLLM

lint: $(STAMPS)/tools $(STAMPS)/package ## formatting, lint, types, layers, file sizes
	$(PY) -m ruff format --check src tests benchmarks scripts
	$(PY) -m ruff check src tests benchmarks scripts
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'native/*.cc' 'native/*.h')
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) scripts/check_file_sizes.py

format: $(STAMPS)/tools ## rewrites sources in the house format
	$(PY) -m ruff format src tests benchmarks scripts
	$(PY) -m ruff check --fix-only --quiet src tests benchmarks scripts
	$(VENV)/bin/clang-format -i $$(git ls-files 'native/*.cc' 'native/*.h')

native: ## the extension, built in place for work on the sources (src/lmcache/_native*.so)
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(PY)) > /dev/null
	cmake --build build/dev
	cp --remove-destination build/dev/_native*.so src/lmcache/

native-test: ## C++ tests: plain, with ASan and UBSan, with TSan
	@for kind in plain address,undefined thread; do \
	  sanitize=$$kind; [ $$kind = plain ] && sanitize=; \
	  folder=build/test-$${kind%%,*}; \
	  echo "C++ tests: $$kind"; \
	  cmake -S . -B $$folder -G Ninja -DLMCACHE_BUILD_BINDINGS=OFF -DLMCACHE_BUILD_TESTS=ON -DLMCACHE_SANITIZE=$$sanitize > /dev/null && \
	  cmake --build $$folder > $$folder/build.log || { tail -n 40 $$folder/build.log; exit 1; }; \
	  ctest --test-dir $$folder --output-on-failure --timeout 300 || exit 1; \
	done

python-test: $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools ## Python tests, the ones with real vLLM included
	$(PY) -m pytest tests -m "not slow"

READY := $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools
nightly: $(READY) ## all that takes long, part by part, with a table of results at the end; PYTEST="-k ..." selects
	$(PY) scripts/nightly.py -- $(PYTEST)

nightly-shapes: ## every model shape with a real vLLM
nightly-engine: ## the other long tests with a real vLLM
nightly-faults: ## every medium under every fault, 200 power cuts
nightly-kill: ## 200 rounds of load, kill -9 and restart for everything that keeps objects; 300 stops at random moments
nightly-simulation: ## 100,000 steps of the index and its controllers, 50 runs of every shape of the connector
nightly-contract: ## 50,000 random operations an adapter
nightly-cap: ## 10 GB under a cap, 200,000 salts
nightly-others: ## slow tests that no other part has
$(NIGHTLY): nightly-%: $(READY)
	$(PY) scripts/nightly.py $* -- $(PYTEST)

SOAK ?= 7200
soak: $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools ## mixed traffic for two hours (SOAK=seconds), a quarter of it without vLLM: memory flat, nothing held at the end
	LMCACHE_SOAK_SECONDS=$$(($(SOAK) / 4)) $(PY) -m pytest -s tests/process/test_soak.py
	LMCACHE_SOAK_SECONDS=$$(($(SOAK) * 3 / 4)) $(PY) -m pytest -s tests/e2e/test_soak.py

bench: $(STAMPS)/engine $(STAMPS)/package ## the measurements behind the README, about 15 minutes
	$(PY) benchmarks/run.py

clean: ## removes builds and the environment
	rm -rf build $(VENV) src/lmcache/_native*.so

$(PY):
	$(PYTHON) -m venv $(VENV)

# vLLM for CPU, its requirements and what makes a small model.
$(STAMPS)/engine: scripts/install_cpu_engine.py | $(PY)
	$(PY) scripts/install_cpu_engine.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/tools: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet $$($(PY) scripts/list_extras.py test lint) "scikit-build-core>=0.10,<1" "nanobind>=2.4,<3"
	@mkdir -p $(@D) && touch $@

# The engine comes first, so that it and not this package decides the versions of what both need.
$(STAMPS)/package: $(SOURCES) $(STAMPS)/engine
	$(PY) -m pip install --quiet .
	@mkdir -p $(@D) && touch $@
