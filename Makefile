# make demo   the main job        make test   the whole test suite        make setup   the set-up
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.kedge
SLOW   ?= slow or not slow

.PHONY: demo test lint fast setup bench clean help

help:
	@sed -n 's/^# //p' Makefile

# PyTorch first, by version: a bare "torch" would bring several gigabytes of CUDA packages.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable ".[dev,pipeline,math]"
	@touch $@

setup: $(STAMP)

demo: setup
	$(BIN)/python examples/demo/run.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "$(SLOW)"

fast: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow and not vllm and not ray"

bench: setup
	$(BIN)/python -m benchmarks.ppo_vs_trl

clean:
	rm -rf $(VENV) runs trainer_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
