# Everything runs in .venv, which is made on demand. Outside this folder only `make test` may install something, a
# browser, and says so before. A target installs only when pyproject.toml or constraints.txt is newer than the last
# installation; constraints.txt has the exact versions.

SHELL := /bin/bash
# The tests start hundreds of processes; without bytecode each of them would compile all of memd.
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
.PHONY: demo quick test all-tests llama-tests fuzz faults cluster lint layout types openapi constraints clean help

PY := .venv/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check
# Of what is installed only a part is ever imported; that is compiled then.
INSTALL = $(PIP) install --no-compile -c constraints.txt -e
PYTEST := $(PY) -m pytest -n auto --dist worksteal
ON_LINUX := $(filter Linux,$(shell uname))

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: .venv/installed ## Install memd into .venv and play a long conversation through it (no model needed)
	@$(PY) -m memd demo $(DEMO_FLAGS)

quick: .venv/installed-quick ## Lint and the tests that start no process, in a minute: run it after every change
	$(RUFF)
	$(PYTEST) -m "not process and not llama and not browser and not node and not thorough$(if $(ON_LINUX),, and not linux)" $(PYTEST_FLAGS)

# Types are checked on one core only, packages are unpacked on one: two at a time.
test: ## Lint, types and all tests, beside each other (BROWSER=no: install no browser for them)
	@$(MAKE) --no-print-directory --jobs=2 lint all-tests

all-tests: layout .venv/browser .venv/llama.cpp/fetched
	$(PYTEST) $(if $(ON_LINUX),,-m "not linux") --hypothesis-profile=whole --durations=15 $(PYTEST_FLAGS)

llama-tests: .venv/llama.cpp/fetched ## llama.cpp's own server tests: what passes directly must pass through memd (a quarter of an hour)
	@$(PY) tests/support/llamacpp_suite.py $(LLAMA_TESTS_FLAGS)

fuzz: .venv/installed-test ## Many more random inputs to what reads untrusted bytes, other ones each time (some minutes)
	$(PY) -m pytest --hypothesis-profile=fuzz $(PYTEST_FLAGS) tests/test_wire_*.py

faults: .venv/installed-test ## Let every call on a file fail once, under a running daemon (an hour; FAULTS_FLAGS="--every 9": a part)
	@$(PY) tests/faults/matrix.py $(FAULTS_FLAGS)

cluster: .venv/installed-test ## Two passes of troubles in a cluster of real processes under load (a quarter of an hour; CLUSTER_FLAGS="--only kill")
	@$(PY) tests/cluster/rounds.py $(CLUSTER_FLAGS)

lint: layout types ## Lint, layout and types only

layout: .venv/installed-test
	$(RUFF)

types: .venv/installed-test
	$(PY) -m mypy

RUFF = $(PY) -m ruff check . && $(PY) -m ruff format --check --quiet memd tests bench examples

openapi: .venv/installed ## Renew docs/openapi.json from the routes
	@$(PY) -c "import json; from memd.admin.routes import ROUTES; from memd.admin.routing import document; \
		print(json.dumps(document(ROUTES), indent=1, ensure_ascii=False))" > docs/openapi.json

constraints: | .venv/bin/python ## Renew constraints.txt: the newest versions that pyproject.toml allows
	$(PIP) install --upgrade --upgrade-strategy eager -e '.[test]' || $(INSTALL_FAILED)
	{ grep '^#' constraints.txt; $(PIP) freeze --exclude-editable; } > .venv/constraints && mv .venv/constraints constraints.txt

clean: ## Remove .venv and what the tools left behind; your memory/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/clients/node_modules \
		clients/typescript/node_modules clients/typescript/dist
	find memd tests bench examples -name __pycache__ -prune -exec rm -rf {} +

# The first Python that is new enough; `make PYTHON=/path/to/python demo` names another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "memd needs Python 3.11 or later; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "this Python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

BROWSERS := chromium-headless-shell chromium chromium-browser google-chrome-stable google-chrome

# The tests of the page drive a real Chromium. Where there is none, root on Debian and Ubuntu gets one, unless BROWSER=no.
.venv/browser: | .venv/bin/python
	@if ! command -v $(BROWSERS) >/dev/null; then \
		if [ "$(BROWSER)" = no ]; then \
			echo "There is no Chromium and BROWSER=no: the tests of the page will be skipped."; \
		elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "The tests of the page need Chromium, and this machine has none. Now installing Debian's package"; \
			echo "chromium-headless-shell with all that it needs (apt-get, for the whole machine, once)."; \
			echo "To run the other tests only: make test BROWSER=no"; \
			(apt-get -qq update && for name in chromium-headless-shell chromium; do \
				DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$name && break; done) \
				>/dev/null 2>&1 || echo "Chromium could not be installed: the tests of the page will be skipped." >&2; \
		else \
			echo "There is no Chromium: the tests of the page will be skipped. Debian and Ubuntu: apt install chromium" >&2; \
		fi; \
	fi
	@if command -v $(BROWSERS) >/dev/null; then touch $@; fi

# The chat templates that llama.cpp ships, its server's main program and the tests of it come with the sources of the
# package that runs it.
.venv/llama.cpp/fetched: .venv/installed-test tests/support/llamacpp_sources.py
	@echo "Fetching llama.cpp's chat templates and server tests (some seconds, once) ..."
	@if $(PY) tests/support/llamacpp_sources.py; then touch $@; else \
		echo "The sources of xllamacpp could not be fetched: the tests that need them will fail or be left out." >&2; fi

INSTALL_FAILED = { echo "The installation failed: what pip says above is the reason." >&2; exit 1; }

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing memd into .venv (a minute or two, once) ..."
	@$(INSTALL) . || $(INSTALL_FAILED)
	@touch $@

.venv/installed-quick: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing memd and what its quick tests need into .venv (a minute or two, once) ..."
	@$(INSTALL) '.[quick]' || $(INSTALL_FAILED)
	@touch .venv/installed $@

.venv/installed-test: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing memd and what its tests need into .venv (a few minutes, once) ..."
	@$(INSTALL) '.[test]' || $(INSTALL_FAILED)
	@touch .venv/installed .venv/installed-quick $@
