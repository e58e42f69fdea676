PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-slow lint wheel clean

install: $(STAMP)

# constraints.txt pins every package, so that two machines test the same thing (and pip takes torch's CPU build).
$(STAMP): pyproject.toml constraints.txt $(wildcard src/block_recurrent/ops/cpp/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

# All of it in about five minutes; the same command goes on where it stopped.
demo: $(STAMP)
	$(BIN)/brt demo

# Two workers of one thread each are faster on two cores than one worker of two threads: most tests are tiny.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
