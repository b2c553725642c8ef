# `make demo` and `make test` set up all they need in .venv; PYTHON is the interpreter to make it with.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
SITE := build/site
# The folder of all versions of the site, and its address or absolute path on the server that shows it.
SITE_ROOT ?= build/published
SITE_URL ?= /
# Every process of a test that starts others would compile this project's modules, where images set it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-groups test-ray test-slow test-page test-site test-versions docs publish-docs dist bench device \
	chaos mutants lint types clean

demo: $(READY)
	$(VENV)/bin/python examples/train_gpt.py

test: $(READY)  # both beside one another: tests on Ray wait for processes half of their time
	$(MAKE) --jobs=2 test-groups test-ray

test-groups: $(READY)
	$(VENV)/bin/python -m pytest -n 2 -m "not slow" --ignore=tests/ray

test-ray: $(READY)  # in one process, which has the one cluster
	$(VENV)/bin/python -m pytest -m "not slow" tests/ray

test-slow: $(READY)
	$(VENV)/bin/python -m pytest -m "slow or hypothesis" --hypothesis-profile=nightly

test-page: $(READY)
	$(VENV)/bin/python -m tests.support.browser  # says how to get Chromium where there is none
	$(VENV)/bin/python -m pytest tests/page

test-site: docs
	$(VENV)/bin/python -m tests.support.browser
	SITE=$(SITE) $(VENV)/bin/python -m pytest tests/site

docs: $(DOCS_READY)  # static files in $(SITE), of which a server needs no more
	rm -rf $(SITE)
	$(VENV)/bin/sphinx-build -q -E -W --keep-going -d build/doctrees docs $(SITE)

publish-docs: $(DOCS_READY)  # RELEASE=--release also renews the folder of this version
	$(VENV)/bin/python docs/publish.py $(SITE_ROOT) --url $(SITE_URL) $(RELEASE)

test-versions: $(READY)
	$(VENV)/bin/nox

dist: $(READY)  # the source distribution and the wheel, after their files were compared with the tree
	$(VENV)/bin/python -m pytest -m "slow or not slow" tests/test_packaging.py
	rm -rf dist
	$(VENV)/bin/python -m build

bench: $(READY)
	$(VENV)/bin/python -m benchmarks --json build/benchmarks.json

device: $(READY)
	$(VENV)/bin/python -m benchmarks --device

chaos: $(READY)
	$(VENV)/bin/python -m benchmarks chaos
	$(VENV)/bin/python -m benchmarks chaos --parts together --kills 30
	$(VENV)/bin/python -m benchmarks chaos --parts left-out --kills 30

mutants: $(READY)  # MUTANTS=planner plants those faults whose names begin so
	$(VENV)/bin/python -m tests.mutants $(MUTANTS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/python .ci/prose.py

types: $(READY)
	$(VENV)/bin/mypy

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

$(DOCS_READY): $(READY)
	$(VENV)/bin/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
