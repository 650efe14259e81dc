# rollforward. `make train` and `make test` need nothing but make, g++ and a Python 3.11 or 3.12: the first call sets up .venv.
#   make train ARGS="algo.group_size=16"    more settings, Hydra's syntax: .venv/bin/rollforward train --help
#   make test ARGS="tests/rl -k advantage"  a part of the tests; ARGS="-n 0" one after another, for a debugger

SHELL := bash
RUN := .venv/bin/
export PYTHON
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test soak check fmt lock clean

help:
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile

setup: ## .venv from the lock of this Python; seconds when nothing changed
	@requirements/install.sh

train: setup ## the tiny DeepSeek-V4: SFT, then GRPO
	@$(RUN)rollforward train recipe=tiny $(ARGS)

test: setup ## everything that runs on two CPU cores in minutes
	@$(RUN)python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not multi_gpu and not benchmark" $(ARGS)

soak: setup ## the longer proofs
	@$(RUN)python -m pytest -m "slow and not gpu and not multi_gpu" --timeout=7200 $(ARGS)

check: setup ## format, lint, types: what CI runs first
	@$(RUN)ruff format --check --quiet . || { echo "make fmt formats them"; exit 1; }
	@$(RUN)ruff check --quiet .
	@$(RUN)basedpyright --level error

fmt: setup ## format and fix what ruff can fix
	@$(RUN)ruff check --quiet --fix-only .
	@$(RUN)ruff format .

# The locks hold what runs on a machine without a GPU, exactly; requirements/overrides.txt says what is left out and why.
lock: setup ## resolve pyproject.toml anew into requirements/lock-py*.txt
	@for version in 3.11 3.12; do \
	  env -u PIP_FIND_LINKS -u UV_FIND_LINKS $(RUN)uv pip compile -q --upgrade --no-header --no-annotate \
	    --python-version $$version --python-platform x86_64-manylinux_2_28 --extra tile --extra dev \
	    --override requirements/overrides.txt pyproject.toml -o requirements/lock-py$${version/./}.txt || exit 1; \
	done

clean: ## remove .venv and caches, never runs/
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
