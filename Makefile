# Everything installs into .venv; nothing outside this folder is changed.
PYTHON ?= python3
BIN := .venv/bin
BUDGET ?= 10

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak mutants prove chaos cluster-test bench bench-smoke check check-page promises map down lock page pictures

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed ## Install the locked dependencies and the tidegate command into .venv

demo: setup ## Start Postgres, Spark and Airflow for the project in examples/, run its pipelines, show the results
	@cd examples && ../$(BIN)/tidegate demo

test: setup ## Run the tests: 10 minutes on two cores; what takes longer is in soak
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.core_seconds $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20

soak: setup ## Run all tests at full size: ten million records, a crash at every point (four hours)
	@SOAK=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 100 --timeout 3600

mutants: setup ## Plant each known fault, and see that a test of make test finds it
	@$(BIN)/python -m tests.mutants

prove: setup ## Drive the ledger by random histories beside a model, for BUDGET minutes
	@$(BIN)/python -m tests.model.prove $(BUDGET)

chaos: setup ## Kill, stop and cut off parts of a running stack, for BUDGET minutes; compare with a clean run
	@$(BIN)/python -m tests.chaos $(BUDGET)

OF_LEDGER = tests/conformance $(wildcard $(patsubst %,tests/integration/test_%.py,migrations registration roles ordered_commit commit_ready attempts shown checks))
cluster-test: setup ## Run what needs several machines: a Spark cluster, Celery workers, a standby; the ledger's tests on PostgreSQL 15 to 17 (an hour)
	@CLUSTER=1 $(BIN)/pytest --durations 0 --timeout 1800 tests/cluster
	@for version in 15 16 17; do POSTGRES_OF_TESTS=$$version $(BIN)/pytest -q -x $(OF_LEDGER) || exit 1; done

bench: setup ## Measure everything beside its peer, keep the figures, draw the plots (two hours, 35 GB of disk and a JDK, on a quiet machine)
	@$(BIN)/python -m benchmarks

bench-smoke: setup ## The same in minutes with small sizes: checks that the benchmarks work, not how fast anything is
	@$(BIN)/python -m benchmarks --smoke

check: setup check-page ## Lint, types, formatting, and whether each promise has its test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.promises --check

promises: setup ## Print what Tidegate promises, line by line, and the tests that hold it
	@$(BIN)/python -m tests.promises

map: ## Print each source file with the first line of its docstring, to find the file for a change: make map | grep -i timeout
	@git ls-files dags jobs state_store migrations tidegate | grep -E '\.(py|tsx?|sql)$$' \
	    | xargs awk 'FNR == 1 {gsub(/^("""|\/\*\* |-- )|("""| \*\/)$$/, ""); print FILENAME ": " $$0}'

down: ## Stop the demo's stack; its data stays in examples/.tidegate
	@if [ -x $(BIN)/tidegate ]; then cd examples && ../$(BIN)/python -c 'from tidegate.cli import main; main()' down; else echo "Nothing is installed, so nothing runs."; fi

lock: setup ## Update the pinned versions and hashes of all requirements*.in, and the lowest ones of pyproject.toml
	@for name in requirements-build requirements requirements-dev; do \
	    $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --generate-hashes \
	        $$name.in -o $$name.txt || exit 1; \
	done
	@$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --generate-hashes \
	    --resolution lowest-direct pyproject.toml -o requirements-lowest.txt

check-page: ## Types, lint and unit tests of the operator's page, and whether its built files are those of its sources (needs Node)
	@if node -e 'const [major, minor] = process.versions.node.split("."); process.exit(major > 20 || (major == 20 && minor >= 19) ? 0 : 1)' 2>/dev/null; \
	    then cd tidegate/page/frontend && npm ci --loglevel=error --no-audit && npm run --silent check; \
	    else echo "Not checked: the page's TypeScript, and its built files. That needs Node 20.19 or newer." >&2; fi

page: setup ## Build the page of the operator from its sources (needs Node; the built files are in the repository)
	@$(BIN)/python -m tests.page.server_types
	@cd tidegate/page/frontend && npm ci --loglevel=error --no-audit && npm run --silent build

pictures: setup ## Renew the pictures in docs/page, from the stack of the browser tests (needs Chromium)
	@PICTURES=1 SOAK=1 $(BIN)/pytest tests/end_to_end/test_one_airflow.py -k every_view

# Programs in .venv name the folder that it was made in: a renamed clone installs again.
made_in := $(shell cat .venv/folder 2>/dev/null)
ifneq ($(made_in),)
ifneq ($(made_in),$(shell cd .venv && pwd -P))
.PHONY: .venv/installed
endif
endif

ifndef INSTALLING
# One at a time: a second make waits and finds it done.
.venv/installed: requirements-build.txt requirements.txt requirements-dev.txt pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/prerequisites
	@$(PYTHON) -c 'import fcntl, subprocess, sys; lock = open(".venv.lock", "a"); fcntl.flock(lock, fcntl.LOCK_EX); sys.exit(subprocess.call(sys.argv[1:]))' \
	    $(MAKE) --no-print-directory INSTALLING=1 .venv/installed
else
# Files are compiled to bytecode once, here: without it, every one of Airflow's many processes would do so on its own.
# Likewise Java's classes are archived once: without it, Spark would read and check them at each start.
.venv/installed: requirements-build.txt requirements.txt requirements-dev.txt pyproject.toml
	@echo "Installing into .venv, which takes a minute or two ..."
	@[ ! -e .venv/folder ] || [ "$$(cat .venv/folder)" = "$$(cd .venv && pwd -P)" ] || rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-build.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --compile-bytecode --no-build-isolation --require-hashes \
	    -r requirements.txt -r requirements-dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation \
	    --config-settings editable_mode=compat --editable .
	@$(BIN)/python -m tidegate.stack.components.spark_class_archive
	@cd .venv && pwd -P > folder
	@touch $@
endif
