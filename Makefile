# The commands a developer must know. On a fresh machine each makes .venv first; nothing here needs a GPU except test-gpu and bench.
#   make demo     build a corpus, train a small model on it, write the run report (the main job)
#   make test     the suite on the CPU                  make test-slow    its tests of more than 0.35 s; make test-all both
#   make check    lint, format, types, wording
#   make test-hard    the suite on a hard machine       make test-newest  the suite with the newest releases
#   make test-gpu what is marked gpu                    make bench    ARGS=kernels | place | graph | feed | train | ranks | lora | decode | families | checkpoint | memory | rl
#   make messages rewrites tests/messages.json, the exact texts that tests compare with, from what the library prints
#   make wheel    builds the archives and runs the wheel in an empty environment
#   make plans    compiles every kernel for every GPU since Ampere, and holds it against their limits
#   make gates    what falls short or is unmeasured     make figures  README's figures from benchmarks/results
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
ARGS   ?=

.PHONY: messages plans wheel demo test test-slow test-all test-hard test-newest check format test-gpu bench gates figures docs docs-check clean

# One stamp a set of requirements: editing pyproject.toml or constraints.txt installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gpubound needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/gpubound demo $(ARGS)

# Three processes with a thread each for two cores: with torch's default threads would wait for each other, and of two processes
# one often waits for a disk or for a program that it started: for a second of CPU 0.62 s passed, of slow tests 0.75; 0.58 and 0.65 with three. A process
# that has finished its share of the tests takes over part of another's. Bytecode is kept in any case: without it each process that a
# test starts compiles the library, and each `make test` rewrites the tests' assertions again: 8 s.
CPU_TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 3 --dist worksteal
test: $(VENV)/.installed
	$(CPU_TESTS) -m "not gpu and not slow" $(ARGS)

# Few tests take half of the time: runs of the command line, all families at once, processes of several ranks.
test-slow: $(VENV)/.installed
	$(CPU_TESTS) -m "slow and not gpu" $(ARGS)

# Both in one run, as CI takes them: one process imports the tests, 10 s of CPU, and the three that it forks collect them, 2 s each.
test-all: $(VENV)/.installed
	$(CPU_TESTS) -m "not gpu" $(ARGS)

# Review the diff: every text that a test compares with and that changed is in it. What still fails afterwards is no text.
messages: $(VENV)/.installed
	rm -rf build/messages
	UPDATE_MESSAGES=$(CURDIR)/build/messages OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS) || true
	UPDATE_MESSAGES=$(CURDIR)/build/messages $(PY) -m tests.messages

# Both under other instruction sets, thread counts, orders of files, and beside busy processes: seven runs.
test-hard: $(VENV)/.installed
	$(PY) tests/hard.py $(ARGS)

# Both with the newest releases of everything, as a plain install takes them: gigabytes, where torch's is a CUDA build.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]'
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) tests/wording.py

# tests/kernels/plans_fit.py: no GPU is needed, and only what is new is compiled.
plans: $(VENV)/.installed
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(PY) -m tests.kernels.plans_fit

# tests/wheel.py: builds the sdist and the wheel, installs the wheel in an empty environment, and runs its commands.
wheel: $(VENV)/.installed
	$(PY) tests/wheel.py

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# A GPU machine may hold its own torch and no network: the two below use $(PYTHON) as it is.
# What the caller's PYTHONPATH names follows ours.
OURS := PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}"

# ARGS='-n 14' distributes the tests over 14 processes. One thread each: with torch's default each would start one thread a core.
# Each process takes the next of the machine's GPUs. What measures time, or all of a card's memory, and what needs two GPUs runs
# afterwards and alone.
GPU_TESTS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(OURS) $(PYTHON) -m pytest -p no:cacheprovider
test-gpu:
	$(GPU_TESTS) -m "gpu and not (alone or two_gpus)" $(if $(findstring -n,$(ARGS)),--dist worksteal) $(ARGS)
	$(GPU_TESTS) -m "gpu and (alone or two_gpus)"

bench:
	$(OURS) $(PYTHON) -m gpubound bench $(ARGS)

# These two need torch, but no GPU.
HERE := $(if $(wildcard $(VENV)/.installed),$(PY),$(PYTHON))
gates:
	$(OURS) $(HERE) -m benchmarks.gates

figures:
	$(OURS) $(HERE) -m benchmarks.figures

$(VENV)/.docs: $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# In an empty environment, from a clone of what is committed: installs as README says, and follows README and docs block by block.
docs-check:
	$(PYTHON) tests/docs/check.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache
