# make demo    install, fetch a real YOLOv8s, build, certify, predict, time it; leaves demo/
# make test    the checks and the test suite
# make test-all  also what takes minutes: SAM's ViT-B against its publisher's predictor
# make check   ruff and mypy only
# make cubins  every GPU kernel compiled for six architectures, no GPU needed; registers, spills, shared memory
# make gpu-check  on a machine with an NVIDIA GPU: right answers, then their cost; 5 minutes, needs no network
# make bench   five models beside everybody else who runs here, on a quiet machine; 25 minutes; leaves a report
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test test-all check format cubins gpu-check bench clean
.DELETE_ON_ERROR:

# pip writes its progress here; the stamp is made anew when what is to be installed changes.
# sam2 is what the tests hold SAM 2 against; by itself it would compile a CUDA extension and pin other packages.
# nvidia-pytriton carries the server; by itself it would bring an old NumPy, which the server does not need.
# editable_mode=compat: found from the checkout's parent folder too, which has a folder of the package's name.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev]'
	SAM2_BUILD_CUDA=0 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps sam2==1.1.0
	$(BIN)/python -m pip install --quiet --no-deps nvidia-pytriton==0.7.0
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python benchmarks/demo.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-all: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'slow or not slow'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

cubins: $(STAMP)
	$(BIN)/python -m visionfast.cubins

gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py $(GPU_CHECK)

# BENCH='--weights-dir DIR' for trained checkpoints that cannot be fetched; see docs/bench.md.
bench: $(STAMP)
	$(BIN)/python benchmarks/suite.py $(BENCH)

clean:
	rm -rf .venv demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
