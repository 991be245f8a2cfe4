# Every target sets itself up in .venv, from a fresh clone, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := .[cli,testing,transformers]

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all quick compiled gpu deepspeed fuzz test-oldest test-newest test-torch2.11 lint docs clean

help:
	@echo "make demo   train a small model three ways, compare, write out/ (set-up, then 2 minutes)"
	@echo "make test   tests that find nearly every defect, in twelve minutes on two cores (once set up)"
	@echo "make test-slow  the other tests: half an hour"
	@echo "make test-all  every test: test and test-slow"
	@echo "make quick  make test without the compiled kernels"
	@echo "make compiled  all tests of what Triton compiles for sm_80 and sm_90, without a GPU"
	@echo "make gpu    all tests of compiled kernels on this machine's GPU; the three above have it, too"
	@echo "            JITTER=7 sums products as another CPU would, ORDER=7 shuffles the tests,"
	@echo "            TESTS=tests/loss chooses among them: for each of the five"
	@echo "make deepspeed  tests of ZeRO with DeepSpeed 0.19.8"
	@echo "make fuzz   property tests on random examples for SECONDS=300"
	@echo "make test-oldest, make test-newest, make test-torch2.11"
	@echo "            every test with the oldest and the newest torch and Triton (Python 3.10, 3.13),"
	@echo "            and with those that GPU results were measured with (Python 3.12)"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make docs   build the site to out/site, warnings as errors (its own set-up: .venv-docs)"
	@echo "make clean  remove the environments, out/ and caches"
	@echo "Set-up goes to .venv by itself; PYTHON=python3.12 chooses another interpreter."

demo: $(STAMP)
	@echo "== demo: one model trained three ways, plots and numbers to out/"
	@$(BIN)/python examples/demo.py

test: CHOSEN = -m "not slow"
test-slow: CHOSEN = -m slow
test test-slow test-all: $(STAMP)
	@begin=$$(date +%s); export FAILED_TESTS=$$(mktemp); status=0; parts=; \
	for part in quick compiled gpu; do \
		if [ $$part = gpu ] && ! $(HAS_GPU); then parts="$$parts, gpu not here"; continue; fi; \
		if $(MAKE) --no-print-directory $$part CHOSEN='$(CHOSEN)'; then parts="$$parts, $$part passed"; \
		else status=1; parts="$$parts, $$part FAILED"; fi; \
	done; \
	if [ $$status = 0 ]; then end="passed"; else end="FAILED: $$(paste -sd ' ' $$FAILED_TESTS)"; fi; \
	rm $$FAILED_TESTS; echo "== $@: $$end ($$(($$(date +%s) - begin)) s: $${parts#, })"; exit $$status

# Two processes of one thread each. pytest prints the slowest tests, here and in CI. Each test seeds
# itself (tests/conftest.py), so that a test draws the same in every order.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal --durations=20 $(if $(JITTER),--jitter $(JITTER)) \
	$(if $(ORDER),-p randomly --randomly-seed=$(ORDER) --randomly-dont-reset-seed)

quick: CHOSEN ?= -m "not slow"
quick: $(STAMP)
	@echo "== kernels interpreted"
	@$(PYTEST) $(CHOSEN) --ignore=tests/compiled $(TESTS)

# In processes of their own: elsewhere in the suite the kernels are interpreted.
compiled: $(STAMP)
	@echo "== what Triton makes for sm_80 and sm_90, interpreted"
	@$(PYTEST) $(CHOSEN) tests/compiled

# A file of tests is a process, so that a context that dies takes no other file with it.
HAS_GPU = $(BIN)/python -c "import sys, torch; sys.exit(not torch.accelerator.is_available())"
gpu: $(STAMP)
	@echo "== compiled kernels on the GPU"
	@$(HAS_GPU) || { echo "torch sees no GPU here"; exit 1; }
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 8 --dist loadfile --durations=20 tests/gpu

deepspeed: $(STAMP)
	@echo "== ZeRO 0 to 3 with DeepSpeed itself, which is installed into .venv"
	@$(BIN)/python -m pip install --quiet -c constraints.txt deepspeed==0.19.8
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/accumulate/test_deepspeed.py tests/head/test_other_engines.py

SECONDS ?= 300
fuzz: $(STAMP)
	@echo "== fuzz: property tests on random examples for $(SECONDS) seconds"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py $(SECONDS)

# Each has its own environment, as big as its torch (about 8 GB), and the Python named here where
# that is installed. TESTS=tests/loss chooses among the tests.
PYTHON_oldest ?= $(shell python3.10 -V >/dev/null 2>&1 && echo python3.10 || echo $(PYTHON))
PYTHON_torch2.11 ?= $(shell python3.12 -V >/dev/null 2>&1 && echo python3.12 || echo $(PYTHON))
PYTHON_newest ?= $(shell python3.13 -V >/dev/null 2>&1 && echo python3.13 || echo $(PYTHON))
test-oldest test-newest test-torch2.11: test-%: .venv-%/.installed
	@echo "== test-$*: the suite with what constraints-$*.txt pins"
	@OMP_NUM_THREADS=1 .venv-$*/bin/pytest -n 2 $(or $(TESTS),--ignore=tests/compiled)
	@$(if $(TESTS),,OMP_NUM_THREADS=1 .venv-$*/bin/pytest -n 2 tests/compiled)

lint: $(STAMP)
	@echo "== lint: ruff check, ruff format --check, mypy, import-linter"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

# Its environment holds no torch: the API is read from the source.
docs: .venv-docs/.installed
	@echo "== docs: the site to out/site, warnings as errors"
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

clean:
	@echo "== clean: removing the environments, out/ and caches"
	@rm -rf .venv .venv-oldest .venv-newest .venv-torch2.11 .venv-docs out build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyPI's torch for Linux needs NVIDIA's libraries, also where no GPU is.
define WITHOUT_GPU
== no GPU is seen here, but 5 GB of CUDA come with PyPI's torch. Without them: interrupt this, and
   $(PYTHON) -m venv .venv
   .venv/bin/pip install $(shell grep -h '^torch==' constraints.txt) --index-url https://download.pytorch.org/whl/cpu
endef
export WITHOUT_GPU
# A changed dependency list installs again; a failed install leaves no stamp.
$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: the pinned dependencies into .venv (a few minutes, once)"
	@[ "$$(uname)" != Linux ] || [ -e /dev/nvidia0 ] || [ -e /dev/kfd ] || $(BIN)/python -c "import torch" 2>/dev/null || echo "$$WITHOUT_GPU"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '$(EXTRAS)' --group dev
	@touch $@

.venv-docs/.installed: constraints-docs.txt
	@echo "== set-up: what builds the site into .venv-docs (a minute, once)"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	@touch $@

.venv-%/.installed: pyproject.toml constraints-%.txt
	@echo "== set-up: the $* versions into .venv-$* (several minutes, once)"
	@$(PYTHON_$*) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@.venv-$*/bin/python -m pip install --quiet -c constraints-$*.txt -e '$(EXTRAS)' --group dev
	@touch $@
