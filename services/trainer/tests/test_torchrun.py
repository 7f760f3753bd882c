"""What ranks say of the torchrun that started them, and what of it torch itself promises."""

import pytest
from torch.distributed.launcher.api import LaunchConfig

from keptset_settings import TrainerSettings
from keptset_trainer.loop_settings import changed_settings
from keptset_trainer.torchrun import SHUTDOWN_SECONDS, SHUTDOWN_VARIABLE, check_restarts, time_to_stop

FIRST = {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}


def test_a_torchrun_that_restarts_ranks_is_refused_unless_it_gives_them_a_new_store():
    restarts = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(ValueError, match=r"--max-restarts=3: .*set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in"):
        check_restarts(restarts)
    check_restarts(restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"})  # what that variable makes of it
    check_restarts(restarts | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restarts({})


def test_torchrun_waits_for_its_ranks_as_long_as_the_variable_says(monkeypatch):
    monkeypatch.delenv(SHUTDOWN_VARIABLE, raising=False)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == SHUTDOWN_SECONDS
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "600")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 600


@pytest.mark.parametrize(("given", "waits"), [({}, 30), ({SHUTDOWN_VARIABLE: "60"}, 60)])
def test_a_torchrun_that_waits_for_less_than_a_last_checkpoint_may_take_is_told(given, waits):
    said = time_to_stop(FIRST | given, 60.5)
    assert said.startswith(f"told to stop, torchrun waits {waits} s for these ranks, and then kills them")
    assert "less than trainer.shutdown_timeout = 60.5" in said
    assert f"set {SHUTDOWN_VARIABLE}=61 in its environment" in said


def test_a_torchrun_that_waits_for_long_enough_is_told_of_too():
    said = time_to_stop(FIRST | {SHUTDOWN_VARIABLE: "60"}, 60.0)
    assert said == f"told to stop, torchrun waits 60 s for these ranks ({SHUTDOWN_VARIABLE})"


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "0"}, FIRST | {"LOCAL_RANK": "1"}])
def test_one_rank_of_a_node_says_it_and_nobody_where_there_is_no_torchrun(environment):
    assert time_to_stop(environment, 60.0) is None


def test_another_time_to_stop_is_no_reason_for_ranks_to_begin_anew(tmp_path):
    settings = TrainerSettings()
    path = tmp_path / "settings.json"
    path.write_text(settings.model_copy(update={"shutdown_timeout": 5.0}).model_dump_json())
    assert changed_settings(settings, path) == []
