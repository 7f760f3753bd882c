"""Unknown keys are errors that propose the nearest known key, wherever they are written."""

import os
import string
from unittest import mock

import pytest
import tomli_w
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from keptset_settings import RunSettings, SettingsError, load_run, load_service, read_run
from keptset_settings.explain import known_keys
from keptset_settings.schema import settings

SLOW_MACHINE = examples(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SETTINGS = [s for s in settings(RunSettings) if not any(key.endswith("[]") for key in s.path)]


@st.composite
def misspelled(draw, depths: bool = True):
    """A setting, the tables that choose its kind, and its path with one letter of one key changed."""
    setting = draw(st.sampled_from(SETTINGS))
    at = draw(st.integers(0, len(setting.path) - 1)) if depths else len(setting.path) - 1
    key = setting.path[at]
    place = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_"))
    change = draw(st.sampled_from(["insert", "delete", "replace"]))
    wrong = key[:place] + ("" if change == "delete" else letter) + key[place + (change != "insert") :]
    assume(wrong not in known_keys(setting.path[:at]))
    return setting, at, (*setting.path[:at], wrong, *setting.path[at + 1 :])


def nested(path, value):
    for key in reversed(path):
        value = {key: value}
    return value


@SLOW_MACHINE
@given(misspelled())
def test_one_wrong_letter_in_a_file(tmp_path_factory, case):
    setting, at, path = case
    tree = table = nested(path, 1)
    if setting.variant and at == len(path) - 1:
        for key in path[:-1]:
            table = table[key]
        table["kind"] = setting.variant
    file = tmp_path_factory.getbasetemp() / "misspelled.toml"
    file.write_text(tomli_w.dumps(tree))
    with pytest.raises(SettingsError) as error:
        read_run([file])
    line = next(line for line in str(error.value).splitlines() if f"{path[at]}: unknown key" in line)
    assert setting.path[at] in line.split("did you mean ")[1].split("?")[0].split(" or ")


@SLOW_MACHINE
@given(misspelled(depths=False))
def test_one_wrong_letter_in_an_option(case):
    setting, _, path = case
    assume("" not in path)
    with pytest.raises(SettingsError) as error:
        read_run([], [f"--{'.'.join(path)}", "1"])
    proposals = str(error.value).split("did you mean ")[1].split("?")[0].split(" or ")
    assert f"--{'.'.join(setting.path)}" in proposals


@SLOW_MACHINE
@given(misspelled(depths=False))
def test_one_wrong_letter_in_a_variable(case):
    setting, at, path = case
    assume("" not in path and "__" not in path[at] and path[at].strip("_") == path[at])
    name = "KEPTSET_" + "__".join(path).upper()
    variables = {name: "1"}
    if setting.variant:
        variables["KEPTSET_" + "__".join((*path[:-1], "kind")).upper()] = setting.variant
    with mock.patch.dict(os.environ, variables), pytest.raises(SettingsError) as error:
        read_run([])
    line = next(line for line in str(error.value).splitlines() if f"{path[at]}: unknown key" in line)
    assert setting.path[at] in line.split("did you mean ")[1].split("?")[0].split(" or ")
    assert line.endswith(f"(from {name})")


def test_the_line_of_an_unknown_key(toml, refused):
    path = toml("[orchestrator.train.sampling]\ntop_pp = 0.9")
    expected = f"[orchestrator.train.sampling] top_pp: unknown key, did you mean top_p? (from {path})\n"
    assert refused(load_run, [str(path)]) == expected


def test_a_key_of_another_table_is_pointed_out(toml, refused):
    text = refused(load_run, [str(toml("[orchestrator]\nrow_tokens = 9"))])
    assert "[orchestrator] row_tokens: unknown key here, there is [trainer] row_tokens" in text


def test_a_key_of_another_kind_of_table(toml, refused):
    text = refused(load_run, [str(toml("[trainer.loss]\nkind = 'clipped_ratio'\nmax_weight = 2.0"))])
    assert (
        "[trainer.loss] max_weight: unknown key of kind clipped_ratio, known here: clip_high, clip_low, kind"
        in text
    )


def test_in_a_list_of_tables(toml, refused):
    text = refused(
        load_run, [str(toml("[[orchestrator.train.source]]\n[[orchestrator.train.source]]\nnam = 'x'"))]
    )
    assert "[orchestrator.train.source[1]] nam: unknown key, did you mean name?" in text


def test_variables_for_other_services_are_checked_too(monkeypatch, refused):
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__LOWW", "1")
    text = refused(load_service, "inference", ["--model", "m"])
    assert "[trainer.loss] loww: unknown key, did you mean low? (from KEPTSET_TRAINER__LOSS__LOWW)" in text


def test_an_unknown_option_of_a_service(refused):
    text = refused(load_service, "orchestrator", ["--train.sampling.topp", "0.9", "--stepz=3"])
    assert text.splitlines() == [
        "--train.sampling.topp: unknown option, did you mean --train.sampling.top_p?",
        "--stepz: unknown option, did you mean --steps?",
    ]


def test_a_run_path_is_no_option_of_a_service(refused):
    assert "--inference.port: unknown option" in refused(load_service, "inference", ["--inference.port", "1"])


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["--steps", "10"], "--orchestrator.steps"),
        (["--sampling.top_p=0.9"], "--orchestrator.train.sampling.top_p?"),
        (["--dryrun"], "--dry-run"),
        (["--dryrun", "--helpp"], "--dry-run"),
        (["--confg", "a.toml"], "--config"),
    ],
)
def test_an_option_without_its_table_and_a_flag(refused, argv, meant):
    text = refused(load_run, argv).splitlines()[0]
    assert text.startswith(f"{argv[0].partition('=')[0]}: unknown option, did you mean {meant}")


def test_an_option_in_an_unknown_table_and_one_like_no_other(refused):
    text = refused(load_run, ["--trainr.seed", "1", "--quxx", "2"])
    assert text.splitlines()[0].startswith("--trainr.seed: unknown option, did you mean --trainer.seed")
    assert text.splitlines()[1] == "--quxx: unknown option, see --help"
