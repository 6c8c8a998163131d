# `make demo` and `make test` need Python 3.11 or newer, git and make; everything else goes into .venv.
BIN := .venv/bin
READY := .venv/.ready
KERNELS := .venv/.kernels
FLOWER := .venv/.flower
PIP := -m pip --disable-pip-version-check --quiet
FIND_PYTHON = for name in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  $$name -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done

.PHONY: help demo test test-all test-gpu test-faults lint format bench bench-million bench-flower lock clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Compare Local, FedAvg and PeFLL on embedded data, in about a minute
	@$(BIN)/pefll demo

test: $(READY) $(KERNELS) $(FLOWER) ## Run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal

test-all: $(READY) $(KERNELS) $(FLOWER) ## Run all tests, also the slow ones, with coverage
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal \
	  --cov=pefll --cov-report=term:skip-covered --cov-fail-under=90

test-gpu: $(READY) ## Run the tests of what differs on a GPU, where there is one: kernels, recorded rounds
	@mkdir -p build
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 -p tests.outcome --outcome build/gpu_tests.json \
	  tests/backend tests/engines/test_cuda.py tests/engines/test_cuda_tasks.py

test-faults: $(READY) $(FLOWER) ## Try everything that can go wrong with real clients, as processes: half an hour
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.engines.flower.matrix $(ARGS)

lint: $(READY) ## Check style, format, types and the direction of imports
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY) ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(READY) ## Race our engines against a plain loop and other simulators (ARGS=--quick, ARGS=--help)
	@$(BIN)/python -m benchmarks.speed $(ARGS)

bench-million: $(READY) ## Time rounds among a million clients and among a thousand
	@$(BIN)/python -m benchmarks.million_clients

bench-flower: $(READY) $(FLOWER) ## Time an exchange in process, in Flower's simulation (with Ray) and in a deployment
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.flower_exchanges $(ARGS)

# Build tools are in the lock, so that installing the package itself downloads nothing more.
$(READY): requirements.lock pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { python=$$($(FIND_PYTHON)); test -n "$$python" || { \
	  echo "Python 3.11 or newer with its venv module is needed: install it, or name one with make PYTHON=/path/to/python3"; \
	  exit 1; }; $$python -m venv .venv; }
	@echo "installing into .venv, a few minutes the first time"
	@$(BIN)/python $(PIP) install -r requirements.lock
	@$(BIN)/python $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

# torch for GPUs brings Triton along, and its CPU build does not; tests interpret the kernels without a GPU.
$(KERNELS): $(READY)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python $(PIP) install triton==3.6.0 \
	  || echo "there is no Triton for this machine: tests of the kernels will be skipped"
	@touch $@

# For the tests of real clients. Without it they are skipped, each with a sentence.
$(FLOWER): $(READY) requirements-flower.lock
	@$(BIN)/python $(PIP) install -r requirements-flower.lock \
	  || echo "Flower cannot be installed here: tests of real clients will be skipped"
	@touch $@

lock: ## Make requirements.lock again, with the newest versions that pyproject.toml allows
	@echo "installing into build/lock, a few minutes"
	@rm -rf build/lock && $$($(FIND_PYTHON)) -m venv build/lock
	@build/lock/bin/python $(PIP) install '.[plot,files,tensorboard,dev]' hatchling editables 'typer<0.21' 'click<8.5' 'rich<15' 'packaging<26'
	@{ grep '^#' requirements.lock; build/lock/bin/python $(PIP) freeze --all --exclude pip --exclude pefll \
	  | sed 's/+[a-z0-9.]*$$//' | grep -viE '^(nvidia|cuda|triton)'; } > build/lock.txt
	@build/lock/bin/python $(PIP) install '.[flower]' -c build/lock.txt
	@{ grep '^#' requirements-flower.lock; build/lock/bin/python $(PIP) freeze --all --exclude pip --exclude pefll \
	  | sed 's/+[a-z0-9.]*$$//' | grep -viE '^(nvidia|cuda|triton)' | grep -vxFf build/lock.txt; } > build/flower.txt
	@mv build/lock.txt requirements.lock && mv build/flower.txt requirements-flower.lock

clean: ## Remove .venv, builds and caches; data/, runs/ and demo/ stay
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
