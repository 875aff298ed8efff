# Each target makes `.venv` if it is missing or if its requirements have changed.
.PHONY: demo test test-numa check docs bench
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

export OMP_NUM_THREADS ?= 1

demo: $(READY)
	@$(BIN)/python demo/digits.py

test: $(READY)
	@$(BIN)/python -m pytest -q -m "not slow"

test-numa: $(READY)
	@$(BIN)/python -m pytest -q tests/numa_vm

check: $(READY)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/codespell

docs: $(READY)
	@$(BIN)/sphinx-build -W --keep-going -q docs docs/_build
	@echo "docs/_build/index.html"

bench: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[benchmarks]"
	@for script in $(basename $(filter-out benchmarks/__init__.py benchmarks/two_ranks.py,$(wildcard benchmarks/*.py))); do $(BIN)/python -m $$(echo $$script | tr / .) || exit 1; done

$(READY): pyproject.toml constraints.txt
	@echo "Preparing .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,examples]"
	@touch $@
