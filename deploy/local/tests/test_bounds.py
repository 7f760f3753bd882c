"""What `keptset` waits for is at least what its services may take by their own bounds."""

import pytest

from keptset.grace import seconds_to_end
from keptset.training import longest_silence
from keptset_inference.stopping import CUT_SECONDS, LAST_SECONDS
from keptset_settings import DRAIN_SECONDS, RunSettings
from keptset_trainer.serve import REQUESTS_SECONDS


def run_of(**tables) -> RunSettings:
    return RunSettings.model_validate(tables)


@pytest.mark.parametrize("seconds", [0.5, 60.0, 900.0])
def test_the_trainer_may_take_as_long_to_end_as_its_setting_says(seconds):
    """Else its last checkpoint would be cut off by whoever stops it."""
    run = run_of(trainer={"shutdown_timeout": seconds})
    assert seconds_to_end("trainer", run) >= seconds + REQUESTS_SECONDS + 10
    assert seconds_to_end("inference", run) == seconds_to_end("inference", RunSettings())


@pytest.mark.parametrize("seconds", [None, 0, 300, "300"])
def test_inference_may_take_as_long_to_end_as_its_requests_and_its_engine(seconds):
    run = run_of(inference={"vllm": {} if seconds is None else {"shutdown_timeout": seconds}})
    drain = DRAIN_SECONDS if seconds is None else float(seconds)
    assert seconds_to_end("inference", run) >= drain + CUT_SECONDS + 2 * LAST_SECONDS + 10
    assert seconds_to_end("trainer", run) == seconds_to_end("trainer", RunSettings())


def test_a_time_to_end_that_vllm_refuses_itself_is_none():
    run = run_of(inference={"vllm": {"shutdown_timeout": "soon"}})
    assert seconds_to_end("inference", run) == seconds_to_end("inference", RunSettings())


def test_an_orchestrator_may_be_silent_while_its_trainer_trains_steps_once_more():
    each, interval = 1800.0, 50
    run = run_of(orchestrator={"step_timeout": each}, trainer={"checkpoint_interval": interval})
    assert longest_silence(run) > (interval + 1) * each
