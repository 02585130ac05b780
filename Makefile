# `make help` lists all targets. They need only Python 3.11 or newer and make.
#
# The first target that you run creates .venv and installs the pinned packages of requirements.txt in
# it (for tests also requirements-dev.txt). Later targets install again only after a pin has changed.
# `make … PYTHON=python3` uses that interpreter and its packages as they are, and installs nothing.

CONFIG ?= configs/laptop.yaml
ARGS ?=
# the last run.dir of ARGS, if it has one: the sample and the report must be of the run that trains
RUN ?= $(lastword runs/$(basename $(notdir $(CONFIG))) \
  $(patsubst run.dir=%,%,$(filter run.dir=%,$(subst ',,$(subst ",,$(ARGS))))))

ifdef PYTHON
  runtime :=
  dev :=
else
  PYTHON := .venv/bin/python
  runtime := .venv/.runtime
  dev := .venv/.dev
endif

.PHONY: help train data test test-rest test-all test-slow test-slurm test-alerts lint parity bench bench-gpu docs site exercises clean

help:
	@echo 'make train       prepare the embedded data set, train on it in 3D, and sample from' \
	  'the model'
	@echo '                 (RUN=folder  CONFIG=file.yaml  ARGS="section.key=value …")'
	@echo 'make test        the tests to run after a change: 5 to 13 minutes on two cores'
	@echo 'make test-rest   the tests marked thorough, which make test leaves out; .ci/run runs both'
	@echo 'make test-all    make test, then make test-rest: about 25 minutes'
	@echo 'make test-slow   longer tests: every layout, fifty kills of a run, many starts in one folder'
	@echo 'make test-slurm  the job script on a real Slurm, which is installed: Debian, as root'
	@echo 'make test-alerts  a real Prometheus and an S3 server around a run: where they can be had'
	@echo 'make lint        ruff and mypy'
	@echo 'make data        only train the tokenizer and prepare the data set'
	@echo 'make parity      check that every layout computes the same as an unsharded model'
	@echo 'make bench       the benchmarks that run on a CPU'
	@echo 'make bench-gpu   on one GPU, in three parts of eight minutes (PART=right, fast or open):' \
	  'is it right,'
	@echo '                 how fast is it, what is open; every estimate beside what was measured'
	@echo 'make docs        draw the computed pictures of the guided tour again'
	@echo 'make exercises   the exercises of the guided tour: they fail until you have solved them'
	@echo 'make site        pages, docstrings and source as one static site: site/index.html'
	@echo 'make clean       delete caches; runs, prepared data and .venv stay'
	@echo
	@echo 'PYTHON=python3   with any target: use this interpreter and its packages instead of .venv'

train: data
	$(PYTHON) -m tools.launch $(CONFIG) run.dir=$(RUN) $(ARGS)
	$(PYTHON) -m tools.generate --checkpoint $(RUN) --prompt 'def read(self' --max-new-tokens 100
	$(PYTHON) -m tools.report $(RUN) --out $(RUN)/report.html --png $(RUN)/loss.png
	@echo 'the run is in $(RUN): config.yaml, metrics.jsonl, checkpoints/, loss.png, report.html'

data: prepared/laptop/index.json

# The text is the source code of Python's standard library, because every machine has it.
prepared/laptop/index.json: | $(runtime)
	$(PYTHON) -m tools.tokenizer --source python-stdlib --vocab-size 4096 --out prepared/laptop.model
	$(PYTHON) -m tools.prepare --source python-stdlib --tokenizer prepared/laptop.model \
	  --out prepared/laptop

# Every test matches exactly one of the three -m expressions below. Two workers keep two cores busy,
# because the ranks of a test mostly wait for each other. Each worker starts with half of the tests,
# and the first to finish takes over some of the other's. So both finish at about the same time, and
# most files stay with one worker, which creates their fixtures once.
workers := -n 2 --dist worksteal

test: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(workers) -m "not thorough and not slow"

test-rest: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(workers) -m "thorough and not slow"

test-all: test
	$(MAKE) test-rest

test-slow: $(dev) prepared/laptop/index.json
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m slow
	$(MAKE) test-alerts

test-slurm: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -v tests/slurm/slurm_scenarios.py

test-alerts: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -v tests/monitor/alerts_scenarios.py

lint: $(dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

parity: $(runtime)
	OMP_NUM_THREADS=1 $(PYTHON) -m proofs.parity $(ARGS)

bench: $(dev) prepared/laptop/index.json
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.experts --loss
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.optimizers
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.plan_accuracy

# With a GPU: three parts of at most eight minutes each (benchmarks/gpu/run.py), or those that PART
# names. Without one: the same with tiny sizes in Triton's CPU interpreter. A part that finds
# something wrong does not stop the next.
PART ?= right fast open
bench-gpu: $(dev)
	@failed=0; for part in $(PART); do \
	  OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.gpu.run $$part $(ARGS) || failed=1; \
	done; exit $$failed

docs: $(runtime)
	$(PYTHON) -m docs.pictures

exercises: $(dev)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q docs/exercises

site: $(dev)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# It deletes no .venv whose Python is gone: on other nodes it may be there, and in use.
.venv/bin/python:
	@if test -L .venv/bin/python3 && ! test -e .venv/bin/python3; then \
	  echo 'this machine lacks the Python that made .venv: rm -r .venv, then try again' >&2; exit 1; \
	fi
	@for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "+ $$python -m venv .venv"; "$$python" -m venv .venv && exit 0; \
	    rm -f $@; exit 1; \
	  fi; \
	done; echo 'Python 3.11 or newer is needed, but was not found on PATH' >&2; exit 1

.venv/.runtime: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install -r requirements.txt
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.runtime
	.venv/bin/python -m pip install -r requirements-dev.txt
	@touch $@
