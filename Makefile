PYTHON ?= .venv/bin/python

.PHONY: setup run check test test-all parity matrix bench notebooks

setup: ; python3 bootstrap.py test --collect-only -q > /dev/null

run: ; python3 bootstrap.py run

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

test: ; python3 bootstrap.py test

test-all: ; python3 bootstrap.py test -m "slow or not slow"

parity:
	$(PYTHON) -m pytest -q tests/test_cpu_products.py tests/test_contracts.py \
		tests/test_contracts_attention.py tests/test_engine_bits.py tests/test_trainer_bits.py \
		tests/test_lora_bits.py

matrix: ; $(PYTHON) -m benchmarks.bits_matrix

bench: ; $(PYTHON) -m benchmarks.bench_main_job

notebooks: ; $(PYTHON) -m notebooks.execute
