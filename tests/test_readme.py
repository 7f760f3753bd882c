"""The README's lines of Python run as they stand, and its prompt is what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from keptset_trainer.warm_start.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[1]


def test_the_libraries_example_runs():
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["sets"].rows() == [[3, 17], [5]]
    assert names["ratio"].shape == (2,)
    assert names["ratio"][1] == 1  # a singleton


def test_the_numbers_beside_the_picture_are_what_the_readme_says_of_it():
    """What `make compare` found last: with replay it learns, without replay nearly all is rejected."""
    runs = json.loads((ROOT / "docs" / "compare.json").read_text())
    assert runs["replay"]["reward_last_5"] >= 0.75
    assert runs["replay"]["rejected_sequences_last_5"] == 0
    assert runs["replay"]["mismatch_kl_last_5"] <= 1e-7
    assert runs["replay"]["max_abs_log_ratio"] < 1e-4
    assert runs["no-replay"]["reward_last_5"] <= 0.4
    assert runs["no-replay"]["rejected_sequences_last_5"] >= 0.9
    assert {run["steps"] for run in runs.values()} == {30}


@pytest.mark.parametrize("name", ["README.md", "services/inference/README.md", "deploy/docker/README.md"])
def test_the_prompt_of_the_example_is_one_of_the_demos_model(name):
    (prompt,) = re.findall(r'"token_ids": \[(3,[\d, ]*)\]', (ROOT / name).read_text())
    ids = [int(number) for number in prompt.split(",")]
    messages = [{"role": "user", "content": "abcd"}]
    told = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == told
