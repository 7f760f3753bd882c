"""The learning rate's schedule: a run knows its number of steps, a trainer alone is told."""

import tomllib

import pytest

from keptset_settings import RunSettings, SettingsError, TrainerSettings, resolve_run, resolve_trainer

MODEL = "inference.model = 'm'\norchestrator.steps = 40\n"


def run_of(text: str) -> RunSettings:
    return resolve_run(RunSettings.model_validate(tomllib.loads(MODEL + text)))


def test_a_run_decays_over_its_steps():
    run = run_of("trainer.optimizer = {schedule = 'cosine', warmup_steps = 5}")
    assert run.trainer.optimizer.decay_steps == 40
    assert resolve_run(run) == run
    assert (
        run_of("trainer.optimizer = {schedule = 'linear', decay_steps = 30}").trainer.optimizer.decay_steps
        == 30
    )
    assert run_of("trainer.optimizer = {warmup_steps = 5}").trainer.optimizer.decay_steps is None


def test_a_trainer_alone_is_told_how_many_steps_there_are():
    alone = {"model": "m", "output_dir": "o", "weights_dir": "w"}
    with pytest.raises(SettingsError, match=r'decay_steps: not set, and schedule = "linear" wants it; give'):
        resolve_trainer(TrainerSettings(**alone, optimizer={"schedule": "linear"}))
    resolve_trainer(TrainerSettings(**alone, optimizer={"schedule": "linear", "decay_steps": 9}))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("min_lr = 1e-9", 'min_lr does nothing while schedule = "constant"; set schedule = "linear"'),
        ("decay_steps = 9", 'decay_steps does nothing while schedule = "constant"'),
        ("schedule = 'linear', lr = 1e-6, min_lr = 2e-6", "min_lr = 2e-06 is above lr = 1e-06; lower it"),
    ],
)
def test_what_does_nothing_or_rises_is_refused(written, said):
    with pytest.raises(ValueError, match="optimizer") as refused:
        run_of(f"trainer.optimizer = {{{written}}}")
    assert said in str(refused.value)


@pytest.mark.parametrize("steps", ["", ", decay_steps = 40"])
def test_a_warm_up_that_leaves_nothing_is_refused(steps):
    with pytest.raises(
        SettingsError, match=r"decay_steps = 40: leaves nothing after warmup_steps = 40; raise"
    ):
        run_of(f"trainer.optimizer = {{schedule = 'cosine', warmup_steps = 40{steps}}}")
