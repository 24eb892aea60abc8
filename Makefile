.DEFAULT_GOAL := help
UV := .tools/bin/uv

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(UV): requirements-uv.txt
	python3 -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.txt
	@touch $@

.venv/.synced: $(UV) pyproject.toml uv.lock
	$(UV) sync --frozen --quiet
	@touch $@

.PHONY: test-unit
test-unit: .venv/.synced  ## unit tests, under a minute, no Docker
	.venv/bin/pytest tests/unit

.PHONY: lint
lint: .venv/.synced  ## format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

# A Python that has torch, triton, pytest and hypothesis; the engine's locked environment, in the image.
KERNEL_PYTHON ?= python3

.PHONY: test-kernels
test-kernels:  ## kernel tests in Triton's interpreter, and the sm_120 compile table; no GPU
	PYTHONPATH=kernels:$$PYTHONPATH $(KERNEL_PYTHON) -m pytest tests/kernels

.PHONY: test-gpu
test-gpu:  ## kernel tests at real shapes; needs an NVIDIA GPU
	PYTHONPATH=kernels:$$PYTHONPATH $(KERNEL_PYTHON) -m pytest tests/gpu
