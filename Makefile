# Every target that needs packages installs them into .venv, and again only when pyproject.toml has changed.
# PYTHON names the interpreter (3.11 or newer); PIP_ARGS goes to pip install, e.g. an index of CPU builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin

.PHONY: demo serve test test-all lint readme clean

demo: .venv/.installed-demo
	$(BIN)/gapless demo $(ARGS)

serve: .venv/.installed-demo
	$(BIN)/gapless serve $(ARGS)

test: lint
	$(BIN)/pytest -m "not slow" $(ARGS)

test-all: lint
	$(BIN)/pytest $(ARGS)

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

readme: .venv/.installed-test  # puts the generated options table into README.md
	$(BIN)/gapless options | sed -i -e '/^<!-- options -->$$/,/^<!-- \/options -->$$/{//!d}' -e '/^<!-- options -->$$/r /dev/stdin' README.md

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gapless needs Python 3.11 or newer; this is %s: set PYTHON" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[$*]'
	@touch $@
