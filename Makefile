# Every target sets up what it needs in .venv first; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# An index to install torch from instead of pip's own, such as that of its builds without CUDA (README).
TORCH_INDEX ?=
# Tests run one thread each, one worker per core. Neighbours share fixtures, so a worker takes a run of tests,
# and when done some of another's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

.PHONY: lap lint test test-all bench campaign docs recipes-table setup triton ray others clean

# What a lap needs, at the versions in the first part of constraints.txt: pip has nothing to resolve. Where torch
# comes with CUDA it needs more, which `pip check` finds. Python compiles what it imports, pip need not all.
setup: .venv/.lap-ready

.venv/.lap-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	sed '/^# For tests/,$$d' constraints.txt > .venv/lap.txt
ifneq ($(TORCH_INDEX),)
	$(PIP) install --quiet --no-deps --no-compile --index-url $(TORCH_INDEX) $$(grep '^torch==' .venv/lap.txt)
endif
	$(PIP) install --quiet --no-deps --no-compile --requirement .venv/lap.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	$(PIP) check >/dev/null || $(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.ready: .venv/.lap-ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Triton (0.7 GB) and g++ let tests of the CUDA path run without a GPU. Without them they are skipped by name.
# Not a part of `dev`: where torch is built for CUDA it brings its own.
triton: .venv/.ready
	$(PIP) install --quiet --constraint constraints.txt --no-deps triton

# Ray (0.3 GB) lets tests of races on a cluster start one on this machine. Without it they are skipped by name.
ray: .venv/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[ray]'

# transformers and EleutherAI's harness (0.3 GB) let their tests run. Without them they are skipped by name.
others: .venv/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[share,eval]'

lap: setup
	$(BIN)/hotlap train sprint --size nano

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror hotlap/kernels/cpu/csrc/*.[ch] hotlap/emulation/*.cpp tests/*.c \
		tests/cuda/*.cpp

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

# The site, into site/. A warning is an error: a page that is missing, a link or a heading that is not there.
docs: .venv/.docs-ready
	$(BIN)/python docs/drawings/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/.docs-ready: .venv/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# Hours; stopped, it goes on when called again. CAMPAIGN: options of `python -m campaign`, such as --share 0.1.
CAMPAIGN ?= --write

campaign: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m campaign $(CAMPAIGN)

bench: .venv/.bench-ready
	$(BIN)/python -m bench --write

.venv/.bench-ready: .venv/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

# A quarter of an hour on two cores; stopped, it goes on when called again. RACE: options of `hotlap race`.
RACE ?= --size nano --seeds 3 --schedule.steps 160 --evaluation.every_steps 40 --evaluation.tokens 65536

recipes-table: .venv/.ready
	$(BIN)/python -m bench.recipes_table $(RACE)

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis
