PYTHON ?= .venv/bin/python

.PHONY: setup run check test parity bench notebooks

setup: ; python3 bootstrap.py test --collect-only -q > /dev/null

run: ; python3 bootstrap.py run

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

test: ; python3 bootstrap.py test

parity: ; $(PYTHON) -m pytest -q tests/test_contracts.py tests/test_parity_chain.py tests/test_engine_bits.py

bench: ; $(PYTHON) -m benchmarks.bench_main_job

notebooks: ; $(PYTHON) -m notebooks.execute
