# make demo    install, fetch a real YOLOv8s, build, certify, predict, time it; leaves demo/
# make test    the checks and the test suite
# make check   ruff and mypy only
# make bench   the overhead benchmark, on a quiet machine
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test check format bench clean
.DELETE_ON_ERROR:

# pip writes its progress here; the stamp is made anew when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python benchmarks/demo.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/visionfast fetch yolov8s-people
	$(BIN)/python benchmarks/overhead.py --json benchmarks/results/overhead.raw.json

clean:
	rm -rf .venv demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
