# `make` lists the targets. Everything is installed into $(VENV); nothing outside this folder is changed.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
SOURCES := $(shell git ls-files native src pyproject.toml CMakeLists.txt 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types native native-test python-test nightly soak bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

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

nightly: $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/tools ## what takes long: every model shape; ten minutes of mixed traffic; 200 rounds of load, kill -9 and restart; 300 stops at random moments; long simulations; 10 GB under a cap; 50,000 random operations an adapter
	$(PY) -m pytest tests -m slow
	LMCACHE_KILL_ROUNDS=200 LMCACHE_SIMULATION_STEPS=100000 $(PY) -m pytest tests/process/test_kill_loop.py tests/simulation
	LMCACHE_SIMULATED_RUNS=50 LMCACHE_SIMULATED_SEED=$$(date +%s) $(PY) -m pytest tests/simulation/test_connector.py
	LMCACHE_TEST_CAP_STORE_GB=10 $(PY) -m pytest tests/process/test_cap.py
	LMCACHE_STOP_ROUNDS=300 LMCACHE_STOP_SEED=$$(date +%s) $(PY) -m pytest tests/process/test_stop.py
	LMCACHE_TEST_SALTS=200000 $(PY) -m pytest tests/process/test_many_salts.py
	LMCACHE_POWER_CUTS=200 $(PY) -m pytest tests/faults/test_power_cut.py
	LMCACHE_CONTRACT_STEPS=50000 LMCACHE_CONTRACT_SEED=$$(date +%s) $(PY) -m pytest tests/contract -k like_a_dictionary

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
