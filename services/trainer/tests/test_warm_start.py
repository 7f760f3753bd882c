"""The demo's model: its tokenizer, its data, and the command around it (a few steps of it, not all)."""

import json
import random
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keptset_trainer.warm_start import command, recipe, reverse_text
from keptset_trainer.warm_start.command import alone
from keptset_trainer.warm_start.tokenizer import SPECIAL, VOCAB_SIZE, byte_tokenizer


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Six steps instead of 240."""
    monkeypatch.setattr(recipe, "first_steps", lambda max_letters: 4)
    monkeypatch.setattr(recipe, "SECOND_STEPS", 2)
    monkeypatch.setattr(command, "EVALUATED", 4)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_text_is_its_bytes(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "reverse me\n\x00 äß🎉"
    ids = loaded.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text
    assert len(loaded) == VOCAB_SIZE == 261
    assert loaded.convert_ids_to_tokens(range(5)) == SPECIAL
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_the_shortcut_to_a_prompt_is_the_chat_template():
    tokenizer = byte_tokenizer()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|user|>abc<|end|><|assistant|>"
    assert reverse_text.prompt_ids(tokenizer, "abc") == tokenizer.encode(rendered, add_special_tokens=False)


def test_only_the_answer_and_its_end_are_trained_on():
    tokenizer = byte_tokenizer()
    token_ids, labels = reverse_text.training_batch(tokenizer, ["abc", "z"])
    trained = labels[0] != reverse_text.IGNORED
    assert tokenizer.decode(labels[0][trained]) == "cba<|end|>"
    assert tokenizer.decode(token_ids[0]) == "<|user|>abc<|end|><|assistant|>cba<|end|>"
    assert torch.equal(labels[0][:-1][trained[:-1]], token_ids[0][1:][trained[:-1]])
    assert tokenizer.decode(labels[1][labels[1] != reverse_text.IGNORED]) == "z<|end|>"


def test_strings_are_within_their_bounds():
    lengths = {len(text) for text in reverse_text.strings(random.Random(0), 500, 4, 7)}
    assert lengths == {4, 5, 6, 7}


def test_the_reward_is_the_similarity_to_the_reversed_text():
    assert reverse_text.reward("abcd", "dcba") == 1.0
    assert reverse_text.reward("abcd", "") == 0.0
    assert reverse_text.reward("abcd", "dcbx") == 0.75


def test_the_model_is_the_one_of_the_recipe():
    assert sum(p.numel() for p in recipe.new_model(0).parameters()) == 427_392
    rates = [recipe.learning_rate(step, 180) for step in (0, 19, 179, 180)]
    assert rates == pytest.approx([1e-4, 2e-3, 2e-3, 1e-3])


def test_a_made_model_loads_and_is_not_made_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "LINE_EVERY", 2)
    directory = tmp_path / "model"
    assert command.warm_start(["--directory", str(directory), "--dry-run"]) == 0
    assert "would be made: {'" in capsys.readouterr().out
    assert not directory.exists()
    assert command.warm_start(["--directory", str(directory)]) == 0
    told = capsys.readouterr().out
    assert "mean reward" in told
    assert "warm start: step 2 of" in told, "a log shows how far it is"
    weights = (directory / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size == 261
    assert "chat_template" in json.loads((directory / "tokenizer_config.json").read_text())
    assert 0 <= json.loads((directory / "recipe.json").read_text())["greedy_reward"] <= 1
    assert not (directory / "generation_config.json").exists()

    assert command.warm_start(["--directory", str(directory)]) == 0
    assert "is there already" in capsys.readouterr().out

    again = tmp_path / "again"
    command.warm_start(["--directory", str(again)])
    assert (again / "model.safetensors").read_bytes() == weights
    command.warm_start(["--directory", str(again), "--seed", "1", "--force"])
    assert (again / "model.safetensors").read_bytes() != weights


def test_another_recipe_in_the_directory_is_an_error_with_a_way_out(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text('{"recipe": {"seed": 7}}')
    assert command.warm_start(["--directory", str(tmp_path)]) == 2
    assert "another recipe" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{", "{}", "3"])
def test_a_recipe_that_is_none_is_an_error_with_a_way_out(tmp_path, capsys, text):
    (tmp_path / "recipe.json").write_text(text)
    assert command.warm_start(["--directory", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_model_that_another_process_makes_is_waited_for_and_left_alone(tmp_path, capsys):
    """Two runs that start together on one machine share it: it must not vanish under the first."""
    directory = tmp_path / "models" / "one"
    with alone(directory):
        second = threading.Thread(target=command.warm_start, args=(["--directory", str(directory)],))
        second.start()
        command.make(directory, command.recipe(4, 12, 0))
        made = directory.stat().st_ino
        assert second.is_alive()
    second.join(60)
    assert "waiting for it" in capsys.readouterr().out
    assert directory.stat().st_ino == made


def test_another_warm_start_is_not_waited_for_for_ever(tmp_path):
    with alone(tmp_path / "one"), pytest.raises(TimeoutError, match="waited 0 s for another warm start"):  # noqa: SIM117
        with alone(tmp_path / "one", seconds=0.2):
            pass


def test_a_directory_of_somebody_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert command.warm_start(["--directory", str(tmp_path)]) == 2
    assert "was not made by warm-start" in capsys.readouterr().err


def test_a_warm_start_that_is_interrupted_leaves_no_directory(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "mean_reward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.warm_start(["--directory", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_bounds_that_make_no_strings_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.warm_start(["--directory", str(tmp_path / "m"), "--min-letters", "9", "--max-letters", "3"])
    assert "--min-letters 9, --max-letters 3" in capsys.readouterr().err
