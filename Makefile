# `make demo` and `make test` do all the set-up. Both install only when pyproject.toml has changed.

PYTHON ?= python3
# Three at a time, also on two cores: those that share a Ray wait for its processes, one after the other (tests/conftest.py).
PYTEST_ARGS ?= --numprocesses 3 --dist loadgroup --durations 12
# Seconds that a test of the fast lane may take (tests/support/lanes.py).
TEST_LIMIT_S ?= 20

# The tests start hundreds of processes that import the same modules: none compiles what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-systems test-oldest-ray test-mutations test-all check docs clean

demo: .venv/.installed
	.venv/bin/orchestray train configs/train/digits.yaml

# The fast lane.
test: .venv/.installed-dev
	ORCHESTRAY_TEST_LIMIT_S=$(TEST_LIMIT_S) .venv/bin/python -m pytest $(PYTEST_ARGS) -m "not slow"

# The slow one: statistics, machines that come and go, and the pages after the tutorials.
test-slow: .venv/.installed-dev
	.venv/bin/python -m pytest $(PYTEST_ARGS) -m slow

test-all: test test-slow

# Each command of the table of systems leaves what only its systems leave.
test-systems: .venv/.installed-dev
	.venv/bin/python -m pytest --durations 12 tests/e2e/systems_gate.py

# What meets Ray from the outside and from within, with the oldest that pyproject.toml allows, laid over the newest.
OLDEST_RAY := 2.58.1
test-oldest-ray: .venv/.installed-dev
	.venv/bin/pip install --quiet --no-deps --upgrade --target build/ray-$(OLDEST_RAY) ray==$(OLDEST_RAY)
	PYTHONPATH=$(CURDIR)/build/ray-$(OLDEST_RAY) .venv/bin/python -m pytest --durations 12 -m "not slow" \
		tests/unit/platform/cluster/test_ray_internals.py $(addprefix tests/cluster/test_,$(addsuffix .py,tokens \
		ray_train recovery search_trainable search_tuner application deployed))

# Each row's tests fail once its system is switched off: hours.
test-mutations: .venv/.installed-dev
	.venv/bin/python tests/mutations.py

check: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The pages of docs/reference/ that are made from the code; and the site, into build/site. A warning is an error.
docs: .venv/.installed-dev
	PYTHONPATH=docs .venv/bin/python -m builder.reference
	PYTHONPATH=docs .venv/bin/python -m builder

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("orchestray needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

# A stamp is newer than pyproject.toml when what that file asks for is installed. The development set includes the other.
.venv/.installed: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --editable .
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --editable '.[dev]'
	touch .venv/.installed $@
