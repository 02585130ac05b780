# `make help` lists what can be done. Everything needs Python 3.11 or newer and make, and nothing
# else.
#
# The first command creates .venv and installs the pins of requirements.txt in it (for tests also
# requirements-dev.txt); later ones install again only when a pin changes. `make … PYTHON=python3`
# uses that interpreter and its packages as they are.

CONFIG ?= configs/laptop.yaml
RUN ?= runs/$(basename $(notdir $(CONFIG)))
ARGS ?=

ifdef PYTHON
  runtime :=
  dev :=
else
  PYTHON := .venv/bin/python
  runtime := .venv/.runtime
  dev := .venv/.dev
endif

.PHONY: help train data test test-rest test-all test-slow test-slurm lint parity bench bench-gpu docs site exercises clean

help:
	@echo 'make train       prepare the embedded data set, train on it in 3D, let the model' \
	  'write a line'
	@echo '                 (RUN=folder  CONFIG=file.yaml  ARGS="section.key=value …")'
	@echo 'make test        a covering part of all tests: about 10 minutes on two cores'
	@echo 'make test-rest   the tests marked thorough, which make test leaves out; .ci/run runs both'
	@echo 'make test-all    make test, then make test-rest: under 30 minutes'
	@echo 'make test-slow   what is too long for that: every layout, fifty kills, starts in one folder'
	@echo 'make test-slurm  the job script on a real Slurm, brought up here: Debian, as root'
	@echo 'make lint        ruff and mypy'
	@echo 'make data        train the tokenizer and prepare the data set alone'
	@echo 'make parity      prove that every layout computes the same'
	@echo 'make bench       measure what can be measured on a CPU'
	@echo 'make bench-gpu   on one GPU: is every kernel right, and how fast; how fast is training'
	@echo 'make docs        draw the pictures of the guided tour again'
	@echo 'make exercises   the exercises of the guided tour: they fail until you have done them'
	@echo 'make site        pages, docstrings and source as one static site: site/index.html'
	@echo 'make clean       delete caches; runs, prepared data and .venv stay'
	@echo
	@echo 'PYTHON=python3   with any of them: use this interpreter and its packages instead of .venv'

train: data
	$(PYTHON) -m tools.launch $(CONFIG) run.dir=$(RUN) $(ARGS)
	$(PYTHON) -m tools.generate --checkpoint $(RUN) --prompt 'def read(self' --max-new-tokens 100
	$(PYTHON) -m tools.plot $(RUN) --out $(RUN)/loss.png
	$(PYTHON) -m tools.report $(RUN) --out $(RUN)/report.html
	@echo 'the run is in $(RUN): config.yaml, metrics.jsonl, checkpoints/, loss.png, report.html'

data: prepared/laptop/index.json

# The text is the source code of Python's own standard library: every machine has it.
prepared/laptop/index.json: | $(runtime)
	$(PYTHON) -m tools.tokenizer --source python-stdlib --vocab-size 4096 --out prepared/laptop.model
	$(PYTHON) -m tools.prepare --source python-stdlib --tokenizer prepared/laptop.model \
	  --out prepared/laptop

# Every test is in exactly one of the three expressions below (tests/test_tiers.py). Two workers
# keep two cores busy: the ranks of a test mostly wait for each other. They start with half of the
# tests each, and the first to end takes over some of the other's, so that both end together and
# most files stay with one worker, which makes their fixtures once.
workers := -n 2 --dist worksteal

test: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(workers) -m "not thorough and not slow"

test-rest: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(workers) -m "thorough and not slow"

test-all: test
	$(MAKE) test-rest

test-slow: $(dev) prepared/laptop/index.json
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m slow
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.kill_drill
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.lease_drill

test-slurm: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -v tests/slurm_scenarios.py

lint: $(dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

parity: $(runtime)
	OMP_NUM_THREADS=1 $(PYTHON) -m tools.parity $(ARGS)

bench: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.data_pipeline
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.train_cpu
	$(PYTHON) -m benchmarks.launchers
	$(PYTHON) -m benchmarks.stop_matrix
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.schedule_checker
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.pipeline_schedules
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.checkpoint
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.plan_memory
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.plan_megatron
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.plan_published
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.plan_search
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.generate

# On a GPU: the kernels' tests compiled for it (whole training runs beside them: the compiler leaves
# the GPU idle), then what is measured; about eight minutes. Without one: the same in Triton's CPU
# interpreter, tiny. What fails does not stop the rest.
bench-gpu: $(dev)
	@failed=0; export OMP_NUM_THREADS=1; \
	$(PYTHON) -m pytest -q -m "not slow" tests/test_gpu.py & beside=$$!; \
	$(PYTHON) -m pytest -q -m "not slow" tests/test_kernels.py tests/test_kernel_adamw.py \
	  tests/test_linear_cross_entropy.py::test_the_weight_gradient_is_summed_in_float32 || failed=1; \
	wait $$beside || failed=1; \
	$(PYTHON) -m benchmarks.gpu_kernels $(ARGS) || failed=1; \
	$(PYTHON) -m benchmarks.gpu_model $(ARGS) || failed=1; \
	exit $$failed

docs: $(runtime)
	$(PYTHON) -m docs.draw_mesh
	$(PYTHON) -m docs.draw_tensor
	$(PYTHON) -m docs.draw_sequence
	$(PYTHON) -m docs.draw_pipeline
	$(PYTHON) -m docs.draw_data
	$(PYTHON) -m docs.draw_memory
	$(PYTHON) -m docs.draw_kernels
	$(PYTHON) -m docs.draw_checkpoints
	$(PYTHON) -m docs.draw_slurm
	$(PYTHON) -m docs.draw_extending

exercises: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q docs/exercises

site: $(dev)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "+ $$python -m venv .venv"; "$$python" -m venv .venv && exit 0; \
	    rm -f $@; exit 1; \
	  fi; \
	done; echo 'Python 3.11 or newer is needed, and none was found on PATH' >&2; exit 1

.venv/.runtime: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install -r requirements.txt
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.runtime
	.venv/bin/python -m pip install -r requirements-dev.txt
	@touch $@
