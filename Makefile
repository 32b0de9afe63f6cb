# make train, make test: each makes .venv on the first call and starts at once afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COPIES := learner/llm_utils/fix_copies.py

.PHONY: help train test fix-copies wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

train: $(VENV)/train.stamp  ## train the default job on this machine; a CPU is enough
	$(BIN)/python learner/ppo_llm.py

test: $(VENV)/dev.stamp  ## lint, type check, tests, and the check of copied functions
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
	if [ -f $(COPIES) ]; then $(BIN)/python $(COPIES) --check; fi

fix-copies: $(VENV)/dev.stamp  ## bring functions marked "Copied from" up to date
	$(BIN)/python $(COPIES)

wheel: $(VENV)/dev.stamp  ## build dist/*.whl
	rm -rf build dist
	$(BIN)/python -m build --wheel

clean:  ## remove what the targets made, but not runs/
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp stands for an environment with this extra installed, exactly as constraints.txt says.
$(VENV)/%.stamp: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what [$*] needs into $(VENV) (once; torch is large)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@
