# Every target sets up what it needs in .venv first; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
# Tests run one thread each, one worker per core. Neighbours share fixtures, so a worker takes a run of tests,
# and when done some of another's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

.PHONY: lap lint test test-all bench recipes-table setup triton ray clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Triton (0.7 GB) and g++ let tests of the CUDA path run without a GPU. Without them they are skipped by name.
# Not a part of `dev`: where torch is built for CUDA it brings its own.
triton: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps triton

# Ray (0.3 GB) lets tests of races on a cluster start one on this machine. Without it they are skipped by name.
ray: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'

lap: setup
	$(BIN)/hotlap train sprint --size nano

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror hotlap/kernels/cpu/csrc/*.[ch] hotlap/emulation/*.cpp tests/*.c \
		tests/cuda/*.cpp

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

bench: .venv/.bench-ready
	$(BIN)/python -m bench --write

.venv/.bench-ready: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

# A quarter of an hour on two cores; stopped, it goes on when called again. RACE: options of `hotlap race`.
RACE ?= --size nano --seeds 3 --schedule.steps 160 --evaluation.every_steps 40 --evaluation.tokens 65536

recipes-table: setup
	$(BIN)/python -m bench.recipes_table $(RACE)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
