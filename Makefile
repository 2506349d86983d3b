# Everything runs in the project's own environment, .venv; `make` alone lists what there is.
# PYTHON is the interpreter that makes that environment (3.11 to 3.14); ARGS goes to the command a target runs.
PYTHON ?= python3
ARGS ?=
# FLWR=1.39 takes the line of Flower whose sites speak gRPC, in place of the newest (docs/flower-releases.md).
FLWR ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed$(FLWR)

# A file of tests stays in one worker. None is replaced: xdist would wait for ever where the lost one had files done.
GROUPS := --dist loadgroup --max-worker-restart 0

# The tests start hundreds of Pythons; without bytecode each would compile the same files anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test test-drills test-docker test-releases check lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the pinned dependencies, if that has not been done

$(STAMP): pyproject.toml constraints.txt constraints-1.39.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "fedhet is installed with Python 3.11 to 3.14, and $(PYTHON) is another: make $(MAKECMDGOALS) PYTHON=python3.13"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sh docker/pins.sh $(FLWR) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(VENV)/constraints.txt -e ".[dev,plots,sweep]"
	@rm -f $(VENV)/.installed* && touch $@

run: $(STAMP) ## train one federated model on real digits (ARGS='task=mnist strategy=scaffold' for another)
	$(BIN)/fedhet $(ARGS)

test: $(STAMP) ## the whole test suite, real Flower runs included
	$(BIN)/python -m pytest -n 3 $(GROUPS) --no-loadscope-reorder -rs --durations=30 $(ARGS)

test-drills: $(STAMP) ## what breaks: federations with faults, small disks, docker/ (mutants: python -m tests.drills.mutants)
	$(BIN)/python -m pytest -m drill -rs --durations=30 tests/drills $(ARGS)

test-docker: $(STAMP) ## the image and its containers in a Docker Engine (FEDHET_TARGET=cpu where torch's CPU index can be reached)
	$(BIN)/python -m pytest -m docker -rs --durations=0 tests/drills/test_containers.py tests/drills/test_containers_readme.py $(ARGS)

test-releases: $(STAMP) ## the wheel in empty environments, with the oldest and the newest releases that it allows; downloads gigabytes
	$(BIN)/python -m pytest -s tests/releases.py $(ARGS)

check: lint ## lint, types and the unit tests, for every commit; three quarters of a minute
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n 2 $(GROUPS) --durations=5 -m "not flower and not slow and not drill" $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

docs: $(STAMP) ## build the documentation into site/, and the JSON schema and the comments of conf/, all from schema, recipes and code
	$(BIN)/python -m docs.generator
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: $(STAMP) ## seconds per round beside a plain PyTorch loop that does the same work
	$(BIN)/python -m benchmarks floor $(ARGS)

clean: ## remove the environment and every cache; results/ stays
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
