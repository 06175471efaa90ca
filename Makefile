# One environment for everything: .venv, pinned by constraints.txt. `make` alone lists what there is.
#   PYTHON=python3.12   the Python to make .venv with (3.11 or newer)     HEADLESS=1   no browser, print the URL
#   PYTEST_ARGS="-x"    more arguments for pytest                         TESTS=tests  what `make test` collects

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?=
TESTS ?= tests notebooks solutions
PYTEST_ARGS ?=
HEADLESS ?=
PORT ?= 8888

# Keyed on content, not on time: a fresh checkout of the same files installs nothing.
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help lab test check exercises notebooks clean

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

lab: $(STAMP) ## JupyterLab at the first notebook; installs what is missing
	@$(BIN)/mlsyslab doctor
	@set --; \
	case "$(HEADLESS)" in \
	  ''|0) [ "$$(uname)" = Darwin ] || [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] || set -- --no-browser;; \
	  *) set -- --no-browser;; \
	esac; \
	[ "$$(id -u)" != 0 ] || set -- "$$@" --allow-root; \
	case "$$*" in *--no-browser*) echo "No display here: open the URL printed below; Ctrl-C ends the server.";; esac; \
	exec $(BIN)/python -m jupyterlab --ip=127.0.0.1 --port=$(PORT) "$$@" \
	  --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

test: $(STAMP) ## every test: units, real ranks, notebooks, exercise gates, browser
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 180 $(TESTS) $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types and unit tests, in under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 -m "not ranks and not kernel and not browser and not gpu" tests $(PYTEST_ARGS)

exercises: $(STAMP) ## write exercises, solutions and lessons anew from their sources
	$(BIN)/python exercises/build.py

notebooks: $(STAMP) ## the same, then run lessons and solutions and keep their outputs
	$(BIN)/python exercises/build.py --execute

clean: ## remove the environment, caches and recorded runs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache test-artifacts runs */runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The user's own python3 comes first; a name on PATH counts only if it runs, is new enough and can make a venv.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  fits='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; found=; \
	  for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	    if $$python -c "$$fits" >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No Python 3.11 or newer with venv was found$(if $(PYTHON), (PYTHON=$(PYTHON))). Install one" \
	      "(on Debian and Ubuntu also python3-venv), or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$found --version)"; $$found -m venv $(VENV); \
	fi
	@echo "Installing the pinned packages into $(VENV) (once; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@
