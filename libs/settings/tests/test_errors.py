"""What users read when settings cannot be used."""

import re

import pytest

from keptset_settings import RunSettings, SettingsError, load_run, load_service, read_run


def test_a_missing_file_says_so(tmp_path, refused):
    path = tmp_path / "none.toml"
    assert (
        refused(load_service, "trainer", ["--config", str(path)])
        == f"{path}: no such file; name an existing one\n"
    )


def test_a_directory_is_no_file(tmp_path, refused):
    assert f"{tmp_path}: cannot be read" in refused(load_run, [str(tmp_path)])


def test_bad_toml_names_file_and_line(toml, refused):
    path = toml("[inference]\nport = = 3\n")
    text = refused(load_service, "inference", ["--config", str(path)])
    assert text.startswith(f"{path}: not TOML: ")
    assert "line 2" in text


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[inference]\nport = 99999", "[inference] port = 99999: must be less than or equal to 65535"),
        ("[inference]\nport = 'many'", '[inference] port = "many": must be a whole number'),
        ("[inference]\nport = true", "[inference] port = true: must be a number"),
        (
            "[trainer.optimizer]\nbetas = [false, 0.9]",
            "[trainer.optimizer] betas[0] = false: must be a number",
        ),
        (
            "[[orchestrator.train.source]]\nratio = true",
            "[orchestrator.train.source[0]] ratio = true: must be a num",
        ),
        ("[trainer]\nrow_tokens = '1024'", '[trainer] row_tokens = "1024": is text; write 1024, without'),
        ("[trainer]\nranks = '2'", '[trainer] ranks = "2": is text; write 2, without quotes'),
        ("[trainer]\nentropy = '0.5'", '[trainer] entropy = "0.5": is text; write 0.5, without quotes'),
        ("[orchestrator]\nsteps = 3.0", "[orchestrator] steps = 3.0: has a decimal point; write 3"),
        ("[trainer]\ndeterministic = 'yes'", 'deterministic = "yes": is text; write true, without quotes'),
        ("[trainer]\ndeterministic = 0", "[trainer] deterministic = 0: is a number; write false"),
        (
            "[[orchestrator.train.source]]\nsampling = {top_p = '0.9'}",
            '[orchestrator.train.source[0].sampling] top_p = "0.9": is text; write 0.9, without quotes',
        ),
        ("[trainer.optimizer]\nbetas = [0.9, '0.9']", '[trainer.optimizer] betas[1] = "0.9": is text; write'),
        ("[inference]\nvllm = 3", "[inference] vllm = 3: must be a table"),
        ("inference = 3", "inference = 3: must be a table"),
        ("[inference]\ncapture = 'v3'", "[inference] capture = \"v3\": must be 'auto', 'v1' or 'native'"),
        ("[trainer]\nentropy = 2.0", "[trainer] entropy = 2.0: must be less than 1; or must be 'full'"),
        ("[trainer.optimizer]\nlr = nan", "[trainer.optimizer] lr = nan: must be a finite number"),
        (
            "[trainer.optimizer]\nbetas = [0.9, 1.0]",
            "[trainer.optimizer] betas[1] = 1.0: must be less than 1",
        ),
        (
            "[trainer.loss]\nlow = 0.5",
            "[trainer.loss] kind: missing; say which: clipped_ratio, truncated_weight",
        ),
        (
            "[trainer.loss]\nkind = 'geometric'",
            'kind = "geometric": unknown kind, did you mean geometric_mean?',
        ),
        (
            "[orchestrator.train]\nsource = []",
            "[orchestrator.train] source = []: must have at least 1 item",
        ),
        ("name = 'a/b'", 'name = "a/b": must be letters, digits, dots'),
    ],
)
def test_a_wrong_value_is_named_with_its_path(content, line, toml, refused):
    path = toml(content)
    text = refused(load_run, [str(path)])
    assert line in text
    assert f"(from {path})" in text


TABLES = ["inference", "warm_start", "weights", "trainer.optimizer", "orchestrator.train.sampling"]


@pytest.mark.parametrize("table", [*TABLES, "trainer.loss", "orchestrator.train.source[0].environment"])
def test_what_is_no_table_is_told_without_the_name_of_a_class(table, toml, refused):
    outer, _, name = table.rpartition(".")
    header = (
        "" if not outer else f"[{outer}]\n" if "[0]" not in outer else f"[[{outer.removesuffix('[0]')}]]\n"
    )
    path = toml(f"{header}{name} = 3")
    place = f"[{outer}] {name}" if outer else name
    assert f"{place} = 3: must be a table (from {path})\n" in refused(load_run, [str(path)])


@pytest.mark.parametrize(
    "table",
    [
        "[warm_start]",
        "[[orchestrator.train.source]]\n[orchestrator.train.source.environment]\nkind = 'reverse-text'",
    ],
)
def test_letters_in_order(table, toml, refused):
    text = refused(load_run, [str(toml(f"{table}\nmin_letters = 6\nmax_letters = 5"))])
    assert "] min_letters = 6 is more than max_letters = 5; raise max_letters or lower min_letters" in text
    load_run([str(toml(f"inference.model = 'm'\n{table}\nmin_letters = 6\nmax_letters = 6"))])


@pytest.mark.parametrize("kind", ["geometric_mean", "sequence_product"])
def test_bands_in_order(kind, toml, refused):
    text = refused(load_run, [str(toml(f"[trainer.loss]\nkind = '{kind}'\nlow = 1.5\nhigh = 1.5"))])
    assert "[trainer.loss] low = 1.5 must be less than high = 1.5; raise high or lower low" in text


@pytest.mark.parametrize("kind", ["geometric_mean", "sequence_product"])
@pytest.mark.parametrize(
    ("low", "high", "why"),
    [
        (2.0, 3.0, "low = 2.0 keeps out the ratio 1, .*; lower low to 1 or less"),
        (0.25, 0.75, "high = 0.75 keeps out the ratio 1, .*; raise high to 1 or more"),
        (1.0, 1.5, None),
        (0.5, 1.0, None),
    ],
)
def test_bands_hold_1(kind, low, high, why, toml, refused):
    loss = f"[trainer.loss]\nkind = '{kind}'\nlow = {low}\nhigh = {high}"
    if why is None:
        loaded = load_run([str(toml(f"inference.model = 'm'\n{loss}"))]).trainer.loss
        assert (loaded.low, loaded.high) == (low, high)
    else:
        assert re.search(rf"\[trainer.loss\] {why}", refused(load_run, [str(toml(loss))]))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8000", "must be a base URL such as"),
        ("ftp://a", "must be a base URL such as"),
        ("http://a?b", "must be a base URL such as"),
        ("http://", "must be a base URL such as"),
    ],
)
def test_urls_are_base_urls(url, why, refused):
    text = refused(load_run, ["--inference.model", "m", "--orchestrator.trainer_url", url])
    assert why in text
    assert (
        read_run(
            [], ["--inference.model=m", "--orchestrator.trainer_url=https://a/b/"]
        ).orchestrator.trainer_url
        == "https://a/b"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port"], "--port: the value is missing; write --port VALUE"),
        (["--port", "--host", "a"], "--port: the value is missing; write --port VALUE"),
        (["port", "9"], "port: not an option; write --key value, and files as --config FILE"),
        (["-p", "9"], "-p: not an option"),
        (["--"], "--: not an option"),
        (["--port", "x"], '[inference] port = "x": must be a whole number (from --port)'),
        (["--vllm", "x"], '[inference] vllm = "x": must be a table (from --vllm)'),
    ],
)
def test_wrong_arguments(arguments, line, refused):
    assert line in refused(load_service, "inference", ["--model", "m", *arguments])


def test_a_variable_is_named_as_the_origin(monkeypatch, refused):
    monkeypatch.setenv("KEPTSET_INFERENCE__PORT", "70000")
    text = refused(load_service, "inference", ["--model", "m"])
    assert (
        '[inference] port = "70000": must be less than or equal to 65535 (from KEPTSET_INFERENCE__PORT)'
        in text
    )


def test_a_list_in_a_variable_must_be_json(monkeypatch, refused):
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__INFERENCE_URLS", "http://a")
    text = refused(load_run, ["--inference.model", "m"])
    assert "[orchestrator] inference_urls: must be JSON: " in text
    assert "(from KEPTSET_ORCHESTRATOR__INFERENCE_URLS)" in text


def test_an_item_of_a_list_is_no_option(refused):
    text = refused(load_run, ["--orchestrator.train.source.0.ratio", "2"])
    assert "lists are given as JSON: --orchestrator.train.source '[...]'" in text


def test_all_problems_at_once(toml, refused):
    text = refused(load_run, [str(toml("nmae = 'x'\n[inference]\nport = -1\n[trainer]\nseeed = 1\n"))])
    assert len(text.splitlines()) == 3


def test_read_run_raises_instead_of_exiting(toml):
    with pytest.raises(SettingsError, match="port") as error:
        read_run([toml("[inference]\nport = -1")])
    assert [problem.path for problem in error.value.problems] == [("inference", "port")]
    with pytest.raises(ValueError, match="Extra inputs"):
        RunSettings(nmae="x")


def test_what_fits_is_taken_as_it_is_and_texts_of_variables_are_parsed(toml, monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__ROW_TOKENS", "1024")
    monkeypatch.setenv("KEPTSET_TRAINER__OPTIMIZER__LR", "1")
    path = toml("[inference]\nmodel = '7'\n[trainer]\nentropy = 'off'\nranks = 'auto'\noptimizer = {eps = 1}")
    run = read_run([path], ["--orchestrator.steps", "3.0", "--trainer.deterministic", "1"])
    assert (run.inference.model, run.trainer.entropy, run.trainer.ranks) == ("7", None, "auto")
    assert (run.trainer.row_tokens, run.orchestrator.steps, run.trainer.deterministic) == (1024, 3, True)
