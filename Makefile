# Everything runs in .venv, which is made on demand; nothing else on the machine is touched.
# A target installs only when pyproject.toml is newer than the last installation.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: demo test llama-tests fuzz lint clean help

PY := .venv/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: .venv/installed ## Install memd into .venv and play a long conversation through it (no model needed)
	@$(PY) -m memd demo $(DEMO_FLAGS)

test: lint .venv/browser .venv/llama.cpp/fetched ## Lint, types and all tests
	$(PY) -m pytest -n auto --dist loadfile $(PYTEST_FLAGS)

llama-tests: .venv/llama.cpp/fetched ## llama.cpp's own server tests: what passes directly must pass through memd (a quarter of an hour)
	@$(PY) tests/support/llamacpp_suite.py $(LLAMA_TESTS_FLAGS)

fuzz: .venv/installed-test ## Many more random inputs to what reads untrusted bytes, other ones each time (some minutes)
	$(PY) -m pytest --hypothesis-profile=fuzz $(PYTEST_FLAGS) tests/test_wire_*.py

lint: .venv/installed-test ## Lint and types only
	$(PY) -m ruff check .
	$(PY) -m mypy

clean: ## Remove .venv and what the tools left behind; your memory/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/clients/node_modules \
		clients/typescript/node_modules clients/typescript/dist

# The first Python that is new enough; `make PYTHON=/path/to/python demo` names another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "memd needs Python 3.11 or later; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "this Python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

BROWSERS := chromium chromium-browser google-chrome-stable google-chrome

# The tests of the page drive a real Chromium. Where there is none and it can be installed, it is; elsewhere they say so.
.venv/browser: | .venv/bin/python
	@if ! command -v $(BROWSERS) >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing Chromium for the tests of the page (half a minute, once) ..."; \
			(apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium) \
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
		echo "The sources of xllamacpp could not be fetched: the tests with llama.cpp's templates will be skipped." >&2; fi

INSTALL_FAILED = { echo "The installation failed. hnswlib is compiled on this machine: it needs a C++ compiler and Python's headers (Debian and Ubuntu: apt install g++ python3-dev)." >&2; exit 1; }

.venv/installed: pyproject.toml | .venv/bin/python
	@echo "Installing memd into .venv (a minute or two, once) ..."
	@$(PIP) install -e . || $(INSTALL_FAILED)
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@echo "Installing memd and what its tests need into .venv (a few minutes, once) ..."
	@$(PIP) install -e '.[llama,test]' || $(INSTALL_FAILED)
	@touch .venv/installed $@
