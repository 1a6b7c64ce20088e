# Everything installs into .venv; nothing outside this folder is changed.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak bench bench-smoke check down lock

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed ## Install the locked dependencies and the tidegate command into .venv

demo: setup ## Start Postgres, Spark and Airflow, run the example pipelines, show what came out
	@$(BIN)/tidegate demo

test: setup ## Run all tests
	@$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

soak: setup ## Run the slow tests at full size: a million messages, ten million records, a crash at every point (an hour)
	@SOAK=1 $(BIN)/pytest --durations 0 --timeout 3600 tests/end_to_end/test_kafka.py tests/acceptance

bench: setup ## Measure every speed beside its peer, add to the history, draw the plots (an hour, on a quiet machine)
	@$(BIN)/python -m tests.benchmarks

bench-smoke: setup ## The same in minutes with small sizes: tells whether the benchmarks work, not how fast anything is
	@$(BIN)/python -m tests.benchmarks --smoke

check: setup ## Lint, types, formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

down: ## Stop the stack; its data stays in .tidegate
	@if [ -x $(BIN)/tidegate ]; then $(BIN)/tidegate down; else echo "Nothing is installed, so nothing runs."; fi

lock: setup ## Pin anew what requirements.in and requirements-dev.in ask for
	@for name in requirements requirements-dev; do \
	    $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header $$name.in -o $$name.txt || exit 1; \
	done

# Files are compiled to bytecode once, here: without it, every one of Airflow's many processes would do so on its own.
# Likewise Java's classes are archived once: without it, Spark would read and check them at each start.
.venv/installed: requirements.txt requirements-dev.txt pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/prerequisites
	@echo "Installing into .venv, which takes a minute or two ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^uv==' requirements-dev.txt)
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --compile-bytecode -r requirements.txt -r requirements-dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --config-settings editable_mode=compat --editable .
	@$(BIN)/python -m tidegate.stack.class_archive
	@touch $@
