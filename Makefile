# Everything runs in the project's own environment, .venv; `make` alone lists what there is.
# PYTHON is the interpreter that makes that environment (3.11 or newer); ARGS goes to the command a target runs.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The tests start hundreds of Pythons; without bytecode each would compile the same files anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test test-docker test-flwr check lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the pinned dependencies, if that has not been done

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedhet needs Python 3.11 or newer, and $(PYTHON) is older: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev,plots,sweep]"
	@touch $@

run: $(STAMP) ## train one federated model on real digits (ARGS='task=mnist strategy=scaffold' for another)
	$(BIN)/fedhet $(ARGS)

test: $(STAMP) ## the whole test suite, real Flower runs included
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -rs --durations=30 $(ARGS)

test-docker: $(STAMP) ## the image and its containers in a Docker Engine (FEDHET_TARGET=cpu where torch's CPU index can be reached)
	$(BIN)/python -m pytest -m docker -rs --durations=0 tests/test_containers.py tests/test_containers_readme.py $(ARGS)

test-flwr: $(STAMP) ## the wheel in two empty environments, with the oldest and the newest flwr that it allows; downloads gigabytes
	$(BIN)/python -m pytest -s tests/flwr_releases.py $(ARGS)

check: lint ## lint, types and the unit tests, for every commit; a minute
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=5 -m "not flower and not slow and not docker" $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

docs: $(STAMP) ## write the pages, the JSON schema and the comments of conf/ that are made from schema, recipes and code
	$(BIN)/python -m docs.generator

bench: $(STAMP) ## seconds per round beside a plain PyTorch loop that does the same work
	$(BIN)/python -m benchmarks floor $(ARGS)

clean: ## remove the environment and every cache; results/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
