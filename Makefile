# make demo   set up and run the main job        make test   set up, lint, types and every test
# make check  the developer's fast loop          make setup  only the virtual environment
# make nvrtc  add what compiles CUDA kernels in tests, without a GPU (230 MB; part of make test)
# make clean  remove what make made

BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE # else every process of every test compiles the package anew

.PHONY: demo test check setup nvrtc lint types clean

demo: setup
	$(BIN)/pdemu compare topologies/quickstart.toml $(ARGS)

test: setup nvrtc lint types
	tools/test.sh $(ARGS)

check: setup lint types
	$(BIN)/python -m pytest --stage=virtual -m "not slow" --hypothesis-profile=quick \
	    --numprocesses=auto --dist=worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements.lock tools/setup.sh
	tools/setup.sh

nvrtc: .venv/.nvrtc

.venv/.nvrtc: .venv/.ready requirements-cuda12.lock tools/setup_nvrtc.sh
	tools/setup_nvrtc.sh

clean:
	find emulator tests tools -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .venv runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
