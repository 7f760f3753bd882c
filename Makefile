# `make help` lists what there is.
PROFILE ?= cpu
PYTHON ?= python3
# Most tests wait most of the time: one process more than cores.
TEST_PROCESSES ?= 3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export TRANSFORMERS_OFFLINE ?= 1
# Without byte code every process compiles vLLM and torch anew at each start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo compare test test-fast test-long test-deploy fuzz soak lint pins clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup:          ## .venv with everything pinned (PROFILE=cpu|cuda, PYTHON=python3)
	@deploy/pins/setup.sh $(PROFILE) $(PYTHON)

demo: setup     ## train a tiny model with top_p 0.97 and replayed kept sets, on this machine
	@$(BIN)/keptset run deploy/local/reverse-text.toml --expect_reward 0.75

compare: setup  ## the same without truncation, with replay and without; draws docs/compare.png
	@$(BIN)/keptset compare deploy/local/reverse-text.toml
	@$(BIN)/pytest -q tests/test_readme.py -k picture

test: setup lint  ## everything, the real engine and the real processes included
	@$(BIN)/pytest -n $(TEST_PROCESSES)

test-fast: setup  ## what needs no engine
	@$(BIN)/pytest -n $(TEST_PROCESSES) -m "not engine and not e2e"

test-long: setup  ## what takes minutes: processes killed at random, damaged answers, an engine on two ranks, two engines
	@$(BIN)/pytest -n $(TEST_PROCESSES) -m long

test-deploy: setup  ## build the images and run them with compose, in a Docker engine of its own if none runs
	@$(BIN)/pytest deploy -m containers
	@FUZZ_REQUESTS=500 $(BIN)/pytest tests/fuzz -m fuzz

fuzz: setup     ## 10,000 good and bad requests and many made up ones to real services, and their memory
	@$(BIN)/pytest tests/fuzz -m fuzz

soak: setup     ## an hour (SOAK_SECONDS) of runs whose processes are killed at random; KILL_SEED=n draws the same again
	@$(BIN)/pytest tests/durability -m soak -s

lint: setup     ## ruff, types of the libs, pins up to date
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@deploy/pins/compile.sh --check

pins: setup     ## write the pin files anew
	@deploy/pins/compile.sh

clean:          ## remove .venv and runs
	rm -rf .venv runs
