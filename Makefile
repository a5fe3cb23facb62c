# Every target sets up what it needs. PYTHON picks the interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.05
WORKERS ?= 2

.PHONY: help venv quickstart test test-slow test-tpu lint size bench clean

help:
	@echo "make quickstart   train a tool-using policy in minutes (sets up $(VENV) first)"
	@echo "make test         the test suite; make test-slow: what takes minutes"
	@echo "make test-tpu     compile for TPUs on this CPU, with libtpu"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make size         lines of code by room, long functions, settings of a config"
	@echo "make bench        speed of engine, update and kernels on this machine"
	@echo "make venv         set-up only; PYTHON=python3.12 picks the interpreter"

$(VENV)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else \
	  f"agentjax is tested on Python 3.11 and 3.12, got {v[0]}.{v[1]}; run: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint \
	  constraints/python$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
	@touch $@

venv: $(VENV)/.ready

quickstart: $(VENV)/.ready
	$(BIN)/python -m agentjax.train --config=configs/quickstart.py --workdir=runs/quickstart

# Most tests compile far more than they run, so LLVM's optimisations would only cost time. Where bits are
# compared across programs (`optimised`) everything is compiled as users have it, as in test-slow.
test: $(VENV)/.ready
	JAX_PLATFORMS=cpu XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0" $(BIN)/python -m pytest \
	  -n $(WORKERS) --dist worksteal -m "not slow and not tpu and not optimised" tests
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  -m "optimised and not slow and not tpu" $$(grep -rl --include='*.py' mark.optimised tests)

test-slow: $(VENV)/.ready
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 1 -m slow tests

# libtpu in an environment of its own: where it is installed, jax looks for a TPU unless told not to.
$(VENV)-tpu/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv --clear $(VENV)-tpu
	$(VENV)-tpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,tpu]' --constraint \
	  constraints/python$$($(VENV)-tpu/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
	@touch $@

test-tpu: $(VENV)-tpu/.ready
	JAX_PLATFORMS=cpu $(VENV)-tpu/bin/python -m pytest -n 1 -m tpu tests

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

size: $(VENV)/.ready
	$(BIN)/python -m tests.size

bench: $(VENV)/.ready
	for b in $(filter-out %/gpu_suite.py,$(wildcard benchmarks/*.py)); do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) $(VENV)-tpu .jax_cache runs build dist *.egg-info
