# `make demo` and `make test` set up all they need in .venv; PYTHON is the interpreter to make it with.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-page test-versions bench device chaos lint types clean

demo: $(READY)
	$(VENV)/bin/python examples/train_gpt.py

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 -m "not slow" --ignore=tests/ray
	$(VENV)/bin/python -m pytest -m "not slow" tests/ray  # in one process, which has the one cluster

test-slow: $(READY)
	$(VENV)/bin/python -m pytest -m slow

test-page: $(READY)
	$(VENV)/bin/python -m tests.support.browser  # says how to get Chromium where there is none
	$(VENV)/bin/python -m pytest tests/page

test-versions: $(READY)
	$(VENV)/bin/nox

bench: $(READY)
	$(VENV)/bin/python -m benchmarks --json build/benchmarks.json

device: $(READY)
	$(VENV)/bin/python -m benchmarks.device

chaos: $(READY)
	$(VENV)/bin/python -m benchmarks.chaos

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
