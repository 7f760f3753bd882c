"""Steps that are trained once more are trained as they were; those after them may be trained otherwise."""

import json

import pytest

from keptset_settings import TrainerSettings
from keptset_trainer.recipe import check_recipe, write_recipe
from keptset_trainer.resume import where_to_start

from .stored_run import folders_of

OTHERS = {
    "optimizer.lr": {"optimizer": {"lr": 0.5}},
    "loss.kind": {"loss": {"kind": "truncated_weight"}},
    "seed": {"seed": 7},
    "dtype": {"dtype": "bfloat16"},
    "full_vocabulary_scores": {"full_vocabulary_scores": True},
    "unsafe_ignore_kept_tokens": {"unsafe_ignore_kept_tokens": True},
}
SAME = {"ranks": 2, "row_tokens": 4096, "checkpoint_interval": 9, "keep_weights": 9, "deterministic": True}


def changed(settings: TrainerSettings, update: dict) -> TrainerSettings:
    given = settings.model_dump(mode="json", exclude_unset=True)
    for name, value in update.items():
        given[name] = (
            given.get(name, {}) | value if isinstance(value, dict) and name == "optimizer" else value
        )
    return TrainerSettings.model_validate(given)


@pytest.mark.parametrize("name", OTHERS)
def test_another_recipe_waits_until_no_step_is_to_be_trained_once_more(name, settings):
    folders = folders_of(settings)
    other = changed(settings, OTHERS[name])
    check_recipe(other, folders, 3, 5)  # nobody has said how they were trained
    write_recipe(settings, folders)
    check_recipe(settings, folders, 3, 5)
    with pytest.raises(ValueError, match=r"steps 4 to 5 .* trained once more") as refused:
        check_recipe(other, folders, 3, 5)
    assert name in str(refused.value)
    assert "checkpoint of step 5, stop the trainer, and change it then" in str(refused.value)
    check_recipe(other, folders, 5, 5)
    write_recipe(other, folders)
    check_recipe(other, folders, 5, 8)
    with pytest.raises(ValueError, match="steps 6 to 8"):
        check_recipe(settings, folders, 5, 8)


def test_how_it_is_computed_may_change_at_any_time(settings):
    folders = folders_of(settings)
    write_recipe(settings, folders)
    check_recipe(changed(settings, SAME), folders, 3, 5)


def test_both_values_are_named_before_anything_is_loaded(settings):
    folders = folders_of(settings)
    write_recipe(settings, folders)
    saved = folders.checkpoint(1)
    saved.mkdir()
    (saved / "checkpoint.json").write_text(json.dumps({"step": 1, "model": settings.model}))
    folders.version(2).mkdir()
    folders.batch(2).touch()
    where_to_start(settings, folders)
    before = settings.optimizer.lr
    with pytest.raises(ValueError, match=rf"trainer.optimizer.lr = 0.5: steps 2 to 2 .* with {before}\."):
        where_to_start(changed(settings, {"optimizer": {"lr": 0.5}}), folders)
