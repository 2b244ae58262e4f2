# make demo   sets up and runs the main job          make test    sets up and runs the tests
# make check  what CI runs                           make fast    unit tests alone, under 30 s
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test fast lint check clean

setup:
	@scripts/setup.sh $(VENV)

demo: setup
	$(BIN)/asyncrl train recipe=arithmetic

test: setup
	$(BIN)/python -m pytest tests -m "not real" -n 2
	$(BIN)/python -m pytest tests -m real

fast: setup
	$(BIN)/python -m pytest tests/unit -m "not real"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
