# Every target sets itself up in .venv, from a fresh clone, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo   train a small model three ways, compare, write out/ (set-up, then 2 minutes)"
	@echo "make test   run the test suite"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove .venv, out/ and caches"
	@echo "Set-up goes to .venv by itself; PYTHON=python3.12 chooses another interpreter."

demo: $(STAMP)
	@echo "== demo: one model trained three ways, plots and numbers to out/"
	@$(BIN)/fusedce demo

test: $(STAMP)
	@echo "== test: the whole suite, two processes of one thread"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

lint: $(STAMP)
	@echo "== lint: ruff check, ruff format --check, mypy"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

clean:
	@echo "== clean: removing .venv, out/ and caches"
	@rm -rf .venv out build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed dependency list installs again; a failed install leaves no stamp.
$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: the pinned dependencies into .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
