"""benchmarks/teach.py: a model that has seen an environment's solutions."""

import importlib.util
import json
import sys
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from keptset_orchestrator import Sums  # noqa: E402
from keptset_orchestrator.tokenizer import ChatTokenizer  # noqa: E402
from keptset_trainer.warm_start.recipe import new_model  # noqa: E402
from keptset_trainer.warm_start.tokenizer import END, byte_tokenizer  # noqa: E402

FILE = Path(__file__).parents[1] / "benchmarks" / "teach.py"


@pytest.fixture(scope="module")
def teach():
    spec = importlib.util.spec_from_file_location("benchmark_teach", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path):
    new_model(0).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_taught_is_what_a_run_asks_and_rewards(teach, model):
    environment = Sums(2, 1, 2)
    examples = list(islice(environment.examples(0, 0), 3))
    ids, labels = teach.rows(byte_tokenizer(), environment, examples)
    asked = ChatTokenizer(str(model))
    for row, label, example in zip(ids.tolist(), labels.tolist(), examples, strict=True):
        prompt = asked.encode_messages(environment.messages(example))
        assert row[: len(prompt)] == prompt
        first = label.index(next(one for one in label if one != teach.IGNORED))
        assert first == len(prompt) - 1  # what the prompt's last token predicts
        answer = label[first : label.index(END) + 1]
        assert row[len(prompt) : len(prompt) + len(answer) - 1] == answer[:-1]
        assert environment.reward(example, asked.decode(answer[:-1])) == 1


@pytest.mark.long
def test_it_ends_when_the_loss_is_low_enough(teach, model, tmp_path, monkeypatch, capsys):
    def taught(name: str, *options: str) -> list[float]:
        sums = '{"kind": "sums", "count": 1, "max_digits": 1}'
        monkeypatch.setattr(sys, "argv", ["teach.py", str(model), str(tmp_path / name), sums, *options])
        teach.main()
        assert (tmp_path / name / "tokenizer.json").is_file()
        return json.loads((tmp_path / name / "taught.json").read_text())["losses"]

    losses = taught("all", "--steps", "12", "--batch", "4", "--lr", "3e-3")
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]
    bound = sum(losses[2:7]) / 5
    fewer = taught("some", "--steps", "12", "--batch", "4", "--lr", "3e-3", "--until-loss", str(bound + 1e-3))
    assert fewer == pytest.approx(losses[: len(fewer)])
    assert len(fewer) <= 7
