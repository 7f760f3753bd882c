"""Written TOML loads to equal settings; --dry-run prints such TOML."""

import string
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import SecretStr

from keptset_settings import (
    InferenceSettings,
    RunSettings,
    load_run,
    load_service,
    read_run,
    to_toml,
    write_service_configs,
)
from keptset_settings.base import Table
from keptset_settings.schema import alternatives

SLOW_MACHINE = examples(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=8)
TEXTS = st.text(max_size=12)
OPEN = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SPECIAL = {
    "name": NAMES,
    "url": NAMES.map("http://{}".format),
    "api_key_env": NAMES,
    "trainer_url": NAMES.map("http://{}".format),
    "router_url": NAMES.map("http://{}".format),
    "inference_urls": st.lists(NAMES.map("http://{}".format), max_size=3),
    "ranks": st.sampled_from(["auto", "external"]) | st.integers(1, 64),
    "entropy": st.sampled_from(["full", "off"]) | st.floats(0.001, 0.999),
    "low": st.floats(0, 1),
    "high": st.floats(1, 1e300, exclude_min=True),
}
ORDERED = (("min_letters", "max_letters"), ("min_digits", "max_digits"), ("min_lr", "lr"))


def of_type(annotation: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of one member of a field's type."""
    origin = get_origin(annotation)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return table(annotation)
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is list:
        members = alternatives(get_args(annotation)[0])
        if members == [int]:  # numbers of GPUs
            return st.lists(st.integers(0, 64), min_size=1, max_size=2, unique=True)
        items = [of_type(item, {}) for item in members]
        return st.lists(st.one_of(items), min_size=1, max_size=2)
    if origin is tuple:
        return st.lists(st.floats(0, 0.99), min_size=2, max_size=2)
    if origin is dict:
        return st.dictionaries(TEXTS, OPEN, max_size=3)
    if annotation is int:
        return st.integers(-(2**31) if low is None else low, 2**31 if high is None else high)
    if annotation is float:
        least, most = -1e300 if low is None else low, 1e300 if high is None else high
        return st.floats(least, most, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    return {bool: st.booleans(), str: TEXTS, Path: NAMES.map("a/{}".format), SecretStr: st.nothing()}[
        annotation
    ]


@st.composite
def table(draw: st.DrawFn, kind: type[Table]) -> dict[str, Any]:
    """A dictionary that this table validates; any key may be left out."""
    content = {}
    for name, field in kind.model_fields.items():
        bounds = {b: getattr(m, b) for m in field.metadata for b in ("ge", "gt", "le", "lt") if hasattr(m, b)}
        members = [of_type(m, bounds) for m in alternatives(field.annotation) if m is not type(None)]
        strategy = SPECIAL.get(name, st.one_of(members))
        if name == "kind" or field.is_required() or (not strategy.is_empty and draw(st.booleans())):
            content[name] = draw(strategy)
    for names in ORDERED:
        if names[0] in kind.model_fields:
            ordered = sorted(content.get(name, kind.model_fields[name].default) for name in names)
            content |= zip(names, ordered, strict=True)
    if "schedule" in kind.model_fields and content.get("schedule", "constant") == "constant":
        content = {name: value for name, value in content.items() if name not in ("min_lr", "decay_steps")}
    return content


@SLOW_MACHINE
@given(table(RunSettings))
def test_any_run_survives_toml(content):
    run = RunSettings.model_validate(content)
    assert RunSettings.model_validate(tomllib.loads(to_toml(run))) == run


@SLOW_MACHINE
@given(table(InferenceSettings))
def test_any_table_survives_toml_below_its_name(content):
    settings = InferenceSettings.model_validate(content)
    loaded = tomllib.loads(to_toml(settings, "inference"))
    assert loaded.keys() <= {"inference"}
    assert InferenceSettings.model_validate(loaded["inference"]) == settings


RUN = """
name = "x"
[warm_start]
[inference.vllm]
dtype = "float32"
hf_overrides = {head_dtype = "float32", empty = {}}
[orchestrator.train.sampling]
top_p = 0.97
extra_body = {stop = "a\\n\\"b", min_tokens = 2}
[[orchestrator.train.source]]
name = "a"
[[orchestrator.train.source]]
name = "b"
sampling = {temperature = 0.6, top_k = 7}
[trainer]
entropy = "off"
loss = {kind = "sequence_product", low = 0.1}
"""


def dry_run(capsys, load, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_:
        load(*arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("service", ["inference", "orchestrator", "trainer"])
def test_dry_run_of_a_service_loads_to_the_same(service, toml, capsys):
    options = {"inference": ["--port", "9"], "orchestrator": ["--steps", "9"], "trainer": ["--seed", "9"]}[
        service
    ]
    arguments = ["--config", str(toml(RUN)), *options]
    printed = dry_run(capsys, load_service, service, [*arguments, "--dry-run"])
    assert tomllib.loads(printed).keys() == {service}
    settings = load_service(service, arguments)
    again = toml(printed, "again.toml")
    capsys.readouterr()
    assert load_service(service, ["--config", str(again)]) == settings
    assert capsys.readouterr().err == ""  # what was chosen for the user is written down now


def test_dry_run_of_a_run_loads_to_the_same(toml, capsys):
    arguments = [str(toml(RUN)), "--trainer.seed=4"]
    printed = dry_run(capsys, load_run, [*arguments, "--dry-run"])
    assert load_run([str(toml(printed, "again.toml"))]) == load_run(arguments)


def test_written_configs_load_to_the_services_of_the_run(toml, tmp_path):
    with pytest.warns(match="512 is used"):
        run = read_run([toml(RUN)])
    paths = write_service_configs(run, tmp_path / "made" / "configs")
    assert [path.name for path in paths] == ["inference-0.toml", "orchestrator.toml", "trainer.toml"]
    for service, path in zip(("inference", "orchestrator", "trainer"), paths, strict=True):
        assert load_service(service, ["--config", str(path)]) == getattr(run, service)
    assert tomllib.loads(paths[0].read_text())["inference"]["enable_return_sampling_mask"] is True


def test_warnings_are_printed_as_text(toml, capsys):
    load_run([str(toml(RUN))])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("warning: [orchestrator.train.source[0].sampling] top_k: sets no bound")
    assert len(printed.err.splitlines()) == 1
