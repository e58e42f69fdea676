PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SANITIZED_INCLUDE = -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))")

.PHONY: install demo test test-slow sanitize lint docs notebooks wheel clean

install: $(STAMP)

# constraints.txt pins every package, so that two machines test the same thing (and pip takes torch's CPU build).
$(STAMP): pyproject.toml constraints.txt $(wildcard src/block_recurrent/ops/cpp/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

# What a memory is worth, in about five minutes; rerun it to resume.
demo: $(STAMP)
	$(BIN)/brt demo

# Two workers of one thread each are faster on two cores than one worker of two threads: most tests are tiny.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# The kernels built with AddressSanitizer and UndefinedBehaviorSanitizer, and forged memory files given to them.
sanitize: $(STAMP)
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -r src/block_recurrent build/sanitized/
	for library in src/block_recurrent/ops/cpp/*.so; do case $$library in *512*) flags="-mavx512f -mavx512dq -mavx512bw \
		-mavx512vl";; *) flags=-mavx2;; esac; gcc -O1 -g -shared -fPIC -fopenmp -fno-math-errno -mfma -mf16c $$flags \
		-fsanitize=address,undefined -fno-omit-frame-pointer $(SANITIZED_INCLUDE) src/block_recurrent/ops/cpp/*.c \
		-o build/sanitized/block_recurrent/ops/cpp/$$(basename $$library) || exit 1; done
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" OMP_NUM_THREADS=1 \
		ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		BRT_SANITIZED="AddressSanitizer and UBSan" PYTHONPATH=build/sanitized \
		$(BIN)/python -m tests.security.measure --out results/hardening-sanitized --only forged

# pip-audit needs its database of advisories: without a network there is nothing to ask.
lint: $(STAMP)
	$(BIN)/ruff check src tests scripts docs
	$(BIN)/ruff format --check src tests scripts docs
	$(BIN)/mypy
	@if $(BIN)/python -m pip_audit --version >/dev/null 2>&1; then $(BIN)/python -m pip_audit -r constraints.txt \
		--no-deps --disable-pip --timeout 5 || test $$? -ne 1 || echo "pip-audit: see above (or no network)"; fi

# Offline and strict: a link that leads nowhere is an error. `make docs` also draws the figures.
docs: $(STAMP)
	$(BIN)/python scripts/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# The notebooks, run top to bottom, with their outputs.
notebooks: $(STAMP)
	$(BIN)/python scripts/run_notebooks.py

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
