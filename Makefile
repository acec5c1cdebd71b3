# Every command of this project. A fresh clone needs make and Python 3.11 to 3.14; the rest is installed into .venv.

VENV := .venv
BIN  := $(VENV)/bin
UV   := $(BIN)/uv

# The interpreter .venv is made with. One that you name is taken or refused; otherwise the first suitable of these is taken.
PYTHON  ?= python3
PYTHONS := $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.11 python3.12 python3.13 python3.14)

# Bytecode is compiled once here: the first import of TensorFlow then takes two seconds instead of six.
INSTALL := $(UV) pip install --python $(BIN)/python --compile-bytecode \
	--constraint constraints.txt --build-constraint constraints.txt --editable

FETCHES := echo "Fetching what datamat needs into $(VENV): about 760 MB, most of it TensorFlow; 3 GB when unpacked."

LOKY := loky==3.7.0

# The test files outside of tests/interop that skip something where a package is missing.
SKIPPING = $(shell grep -rl importorskip tests --include 'test_*.py' --exclude-dir interop | sort)

# Three processes, as two cores would often wait for what tests start.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

ARGS  ?=
BENCH ?= write

.DEFAULT_GOAL := help
.PHONY: help setup demo bytecode test test-clients test-all lint format docs bench constraints clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run  ## run the main job on a street set that it draws itself; results are in demo/
	$(BIN)/python examples/demo.py

# Python keeps no bytecode where PYTHONDONTWRITEBYTECODE is set; each of the thousands of processes that the tests start
# would compile the package again, which takes longer than most of them run.
bytecode: $(VENV)/.dev
	@$(BIN)/python -m compileall -q datamat tests

test: bytecode  ## run the commit tier of the tests; ARGS="tests/writers/test_index.py -x" narrows it
	$(PYTEST) --commit $(ARGS)

test-clients: bytecode $(VENV)/.clients  ## install light readers of others, then run the commit tier's tests with them
	$(PYTEST) --commit --skipped tests/interop $(SKIPPING) $(ARGS)

test-all: bytecode $(VENV)/.interop $(VENV)/.sdists $(VENV)/.servers  ## install all readers and stores, then run every test; takes long
	PATH=$(CURDIR)/$(VENV)/servers/bin:$$PATH $(PYTEST) $(ARGS)

lint: $(VENV)/.dev  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## put the format right, and the style where ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## build the documentation into docs/_build, warnings as errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build

bench: $(VENV)/.dev  ## measure; BENCH=NAME chooses benchmarks/NAME.py, ARGS go to it
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)

constraints: $(UV)  ## pin what pyproject.toml adds, for every supported Python; ARGS=--upgrade pins the newest of all
	$(UV) pip compile pyproject.toml --universal --python-version 3.11 --all-extras --group dev --group setup \
		--quiet --custom-compile-command "make constraints" --output-file constraints.txt $(ARGS)

clean:  ## remove what the commands made, except .venv
	rm -rf demo docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

setup: $(VENV)/.dev  ## make .venv with all that the commands below need; they do so by themselves

# Set-up. Each stamp is redone when the project file or the pinned versions change.

$(VENV)/.run: $(UV) pyproject.toml constraints.txt
	@$(FETCHES)
	$(INSTALL) .
	@touch $@

$(VENV)/.dev: $(UV) pyproject.toml constraints.txt
	@$(FETCHES)
	$(INSTALL) . --group dev
	@touch $@ $(VENV)/.run

# pip takes the build of torch for processors alone where one is at hand; uv would fetch gigabytes for graphics cards.
$(VENV)/.clients: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(INSTALL) '.[clients]' --group dev
	@touch $@

$(VENV)/.interop: $(VENV)/.clients
	$(INSTALL) '.[interop]' --group dev
	@touch $@

# Servers that PyPI does not have: a second one that answers as S3 does, and Azure's emulator, in the last version that
# Node.js 20 runs. Without npm, their tests are skipped.
$(VENV)/.servers: $(VENV)/.dev
	-npm install --global --silent --prefix $(VENV)/servers s3rver@3.7.1 azurite@3.35.0 && touch $@

# Its wheel comes without its tests, which run against our pool. Where it cannot be had, they are skipped.
$(VENV)/.sdists: $(VENV)/.dev
	-$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary loky \
		--dest $(VENV)/sdists $(LOKY) && touch $@

$(VENV)/.docs: $(UV) pyproject.toml constraints.txt
	$(INSTALL) '.[docs]'
	@touch $@ $(VENV)/.run

$(UV):
	@for python in $(PYTHONS); do \
		if $$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; \
			$$python -m venv --clear $(VENV) || exit 1; \
			exec $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv; \
		fi; \
	done; \
	echo "No Python to set up with: tried $(PYTHONS), found none of version 3.11 to 3.14 that has venv." >&2; \
	echo "Install one (on Debian: python3.11 and python3.11-venv) or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
