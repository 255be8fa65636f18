# Two commands on a fresh machine: `make quickstart` and `make test`. Both build the same .venv.
# `make test` leaves out tests marked slow (whole runs that stop and resume, and the like); `make test-all` runs all.
PYTHON ?= python3
# The CPU wheel is enough: torch is only the foreign reference in tests.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: quickstart test test-all lint check clean

quickstart: .venv/run.stamp
	$(BIN)/python -m launch fetch smollm2-135m
	$(BIN)/python -m launch configs/quickstart.yaml

test: .venv/test.stamp lint
	$(BIN)/python -m launch fetch smollm2-135m
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=15 -m 'not slow'

test-all: .venv/test.stamp lint
	$(BIN)/python -m launch fetch smollm2-135m
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=40

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/run.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[gguf]'
	touch $@

.venv/test.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e '.[test]'
	touch $@

clean:
	rm -rf .venv runs
