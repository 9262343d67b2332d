# make demo   set up and run the main job        make test   set up, lint, types and every test
# make check  the developer's fast loop          make setup  only the virtual environment
# make clean  remove what make made

BIN := .venv/bin

.PHONY: demo test check setup lint types clean

demo: setup
	$(BIN)/pdemu compare topologies/quickstart.toml $(ARGS)

test: setup lint types
	$(BIN)/python -m pytest $(ARGS)

check: setup lint types
	$(BIN)/python -m pytest -m "not live and not netns and not compose and not gpu and not slow" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements.lock tools/setup.sh
	tools/setup.sh

clean:
	rm -rf .venv runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
