# The commands of this repository; `make` lists them. Everything they need comes from PyPI and the machine's own apt.
.DEFAULT_GOAL := help
PYTHON ?= python3
UV := .tools/bin/uv
DEPLOY := .venv/bin/deploy
QUESTION ?= What carries the key value cache from prefill to decode?

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# ---- the tool environment

# Debian and Ubuntu ship Python without the part that `venv` needs.
$(UV): requirements-uv.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: there is no program $(PYTHON); as root: apt-get install python3, or name another: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "Python has no venv: installing python3-venv with apt-get"; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends python3-venv >/dev/null || { \
	    echo "error: cannot install python3-venv; as root: apt-get install python3-venv" >&2; exit 1; }; }
	@echo "making the tool environment"
	@$(PYTHON) -m venv .tools
	@.tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.txt
	@touch $@

.venv/.synced: $(UV) pyproject.toml uv.lock
	@$(UV) sync --frozen --quiet --python $(PYTHON)
	@touch $@

# ---- run

.PHONY: demo
demo: .venv/.synced  ## prefill + decode + router on this machine without GPUs: one question, a short load test
	@$(DEPLOY) docker start
	@# 3: it found errors; `up` refuses what it cannot do and says the same.
	@$(DEPLOY) doctor --profile cpu --limit 10 --least warning || [ $$? = 3 ]
	@$(DEPLOY) up --profile cpu
	@printf '\n> %s\n' '$(QUESTION)'
	@$(DEPLOY) chat --max-tokens 64 '$(QUESTION)'
	@printf '\n'
	@# 3: a window that is not valid says so itself, for example on a machine that is busy with other work.
	@$(DEPLOY) bench --url "$$($(DEPLOY) status --url)" -c 16 --duration 10 || [ $$? = 3 ]
	@printf '\nIt stays up: deploy is $(DEPLOY), `make down` removes it all.\n'

.PHONY: docker
docker: .venv/.synced  ## install and start a Docker engine if none answers (INSTALL_DOCKER=no refuses)
	@$(DEPLOY) docker start

.PHONY: up
up: .venv/.synced  ## bring up what deploy.toml says
	@$(DEPLOY) up

.PHONY: build
build: .venv/.synced  ## build the engine image
	@$(DEPLOY) build

.PHONY: down
down: .venv/.synced  ## remove containers, networks, volumes, image, generated model; stop Docker if started from here
	@$(DEPLOY) down --all
	@$(DEPLOY) docker stop

.PHONY: clean
clean:  ## remove the tool environment and caches as well (after `make down`)
	@! test -e .state/docker/process.json || { echo "error: a Docker engine was started from here; first: make down" >&2; exit 1; }
	rm -rf .venv .tools .cache .state .pytest_cache .ruff_cache .hypothesis

# ---- tests

.PHONY: test
test: .venv/.synced /usr/bin/patch  ## lint, lock and tests: unit, kernels, patches, Docker end to end; starts what it needs and stops it again
	@$(DEPLOY) docker run -- $(MAKE) --no-print-directory lint lock-check test-unit test-kubernetes test-kernels test-patches test-docker SELECT=

.PHONY: lock-check
lock-check: .venv/.synced  ## does deploy.lock agree with the repository and deploy.toml? (`deploy lock` mends it)
	@$(DEPLOY) lock --check

# Some tests need the program `patch`, which the image brings for itself.
/usr/bin/patch:
	apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends patch >/dev/null

SELECT ?= -m "not slow"
.PHONY: test-unit
test-unit: .venv/.synced  ## the quick unit tests, no Docker
	.venv/bin/pytest --numprocesses auto $(SELECT)

# Programs that only tests need, unpacked and not installed: the package of the registry would start one for everybody.
PROGRAMS := .cache/programs/usr/bin
$(PROGRAMS)/%:
	@mkdir -p $(PROGRAMS)
	@apt-get -qq update
	@cd .cache/programs && apt-get -qq download $* 2>/dev/null && dpkg-deb --extract $*_*.deb . && rm $*_*.deb && touch usr/bin/$* \
	  || echo "$* is not in this machine's package archives: tests that need it say so"

# Its packages are other versions than ours.
.cache/schemathesis/.synced: $(UV) tests/docker/requirements-schemathesis.txt
	@$(UV) venv --quiet --clear --python $(PYTHON) .cache/schemathesis
	@$(UV) pip install --quiet --require-hashes --python .cache/schemathesis --requirements tests/docker/requirements-schemathesis.txt
	@touch $@

.PHONY: test-docker
test-docker: .venv/.synced $(PROGRAMS)/docker-registry $(PROGRAMS)/cosign $(PROGRAMS)/prometheus  ## the real stack in containers
	$(DEPLOY) build
	.venv/bin/pytest -m "not quiet" tests/docker

.PHONY: test-faults-quick
test-faults-quick: .venv/.synced
	.venv/bin/pytest -m "not long and not soak" tests/faults

.PHONY: test-faults
test-faults: .venv/.synced  ## all fault tests, three quarters of an hour, and their table docs/faults.md; needs a running Docker engine
	$(DEPLOY) build
	.venv/bin/pytest -m "not soak" tests/faults; code=$$?; .venv/bin/python tests/faults/table.py; exit $$code

SOAK_MINUTES ?= 30
.PHONY: soak
soak: .venv/.synced  ## the CPU stack under load with aborts for SOAK_MINUTES; answers, KV pools and memory are watched
	$(DEPLOY) build
	SOAK_MINUTES=$(SOAK_MINUTES) .venv/bin/pytest -m soak tests/faults; code=$$?; .venv/bin/python tests/faults/table.py; exit $$code

.PHONY: test-quiet
test-quiet: .venv/.synced .cache/schemathesis/.synced $(PROGRAMS)/docker-registry  ## what measures the real stack; needs a running Docker engine, 35 GB of disk and a machine that does nothing else
	$(DEPLOY) build
	.venv/bin/pytest -m quiet tests/docker

# The schemas are large and checkov wants older packages than ours, so both have environments of their own.
.cache/kubernetes/.synced: $(UV) pyproject.toml uv.lock
	@UV_PROJECT_ENVIRONMENT=.cache/kubernetes $(UV) sync --frozen --quiet --no-default-groups --group kubernetes --python $(PYTHON)
	@touch $@

.cache/checkov/.synced: $(UV) tests/kubernetes/requirements-checkov.txt
	@$(UV) venv --quiet --clear --python $(PYTHON) .cache/checkov
	@$(UV) pip install --quiet --require-hashes --python .cache/checkov --requirements tests/kubernetes/requirements-checkov.txt
	@touch $@

.PHONY: test-kubernetes
test-kubernetes: .cache/kubernetes/.synced .cache/checkov/.synced $(PROGRAMS)/kustomize  ## manifests against schemas, a policy scan and what they mean; no cluster needed
	.cache/kubernetes/bin/pytest tests/kubernetes

# Against the engine's own torch and Triton: in the image, without network and GPU.
.cache/test-packages/.synced: $(UV) uv.lock
	@$(UV) export --quiet --frozen --only-group test --no-emit-workspace --output-file .cache/test-packages.txt
	@$(UV) pip install --quiet --require-hashes --no-deps --python-version 3.11 --target .cache/test-packages --requirements .cache/test-packages.txt
	@touch $@

IN_IMAGE = image=$$($(DEPLOY) build | cut -d' ' -f1) && docker run --rm --network none --cap-drop ALL --user "$$(id -u):$$(id -g)" \
	  --tmpfs /tmp:exec --volume "$(CURDIR)":/src:ro --workdir /src --env HOME=/tmp --env TRITON_CACHE_DIR=/tmp/triton \
	  --env HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis --env PYTHONDONTWRITEBYTECODE=1 \
	  --env PYTHONPATH=/src/kernels:/opt/cpu_standins:/src/.cache/test-packages --env SGLANG_USE_CPU_ENGINE=1 --entrypoint python "$$image" \
	  -m pytest -p no:cacheprovider

.PHONY: test-kernels
test-kernels: .venv/.synced .cache/test-packages/.synced  ## kernel tests in Triton's interpreter and the sm_120 compiler, in the image
	$(IN_IMAGE) --numprocesses auto tests/kernels

.PHONY: test-patches
test-patches: .venv/.synced .cache/test-packages/.synced  ## what the patches to SGLang change, in the image
	$(IN_IMAGE) tests/patches

# There the GPU's own driver and torch count, so not in the image: any Python with torch, triton, pytest and hypothesis.
GPU_PYTHON ?= python3

.PHONY: test-gpu
test-gpu:  ## kernel tests at real shapes; needs an NVIDIA GPU
	@$(GPU_PYTHON) -c 'import torch, triton, pytest, hypothesis' || { \
	  echo "error: GPU_PYTHON=... must name a Python with torch, triton, pytest and hypothesis" >&2; exit 1; }
	PYTHONPATH=kernels:$$PYTHONPATH $(GPU_PYTHON) -m pytest tests/gpu

.PHONY: lint
lint: .venv/.synced  ## format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
