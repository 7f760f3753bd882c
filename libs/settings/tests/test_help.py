"""--help, --version and the table of settings say everything about every setting."""

import subprocess
import sys

import pytest

from keptset_settings import RunSettings, load_run, load_service, settings_table
from keptset_settings.schema import settings

SETTINGS = list(settings(RunSettings))


def printed_by(capsys, load, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_:
        load(*arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: ".".join(s.path))
def test_every_setting_has_a_meaning(setting):
    assert setting.field.description
    assert setting.field.description.strip().endswith(".")


@pytest.mark.parametrize("service", ["inference", "orchestrator", "trainer"])
def test_help_of_a_service_lists_its_settings(service, capsys):
    text = printed_by(capsys, load_service, service, ["--help"])
    assert text.startswith(f"usage: keptset-{service} [--config FILE.toml]")
    assert max(map(len, text.splitlines())) <= 110
    plain = " ".join(text.split())
    for setting in SETTINGS:
        if setting.path[0] == service and not any(key.endswith("[]") for key in setting.path):
            assert f"--{'.'.join(setting.path[1:]).replace('_', '-')} " in plain
            assert f"KEPTSET_{'__'.join(setting.path).upper()}" in plain
            assert " ".join(setting.field.description.split()) in plain
        elif setting.path[0] != service:
            assert f"KEPTSET_{setting.path[0].upper()}__" not in plain


def test_help_shows_type_and_default(capsys):
    plain = " ".join(printed_by(capsys, load_service, "inference", ["-h"]).split())
    port = "--port Port to listen on; 0 lets `keptset run` choose a free one."
    assert f"{port} whole number, 0 to 65535; default 8000; KEPTSET_INFERENCE__PORT" in plain
    assert '"auto" or "v1" or "native"; default "auto"; KEPTSET_INFERENCE__CAPTURE' in plain
    assert "secret; default unset; KEPTSET_INFERENCE__API_KEY" in plain


def test_help_of_a_run_comes_before_its_problems(capsys):
    text = printed_by(capsys, load_run, ["none.toml", "--help"])
    assert text.startswith("usage: keptset run FILE.toml")
    assert "--orchestrator.train.sampling.top-p" in text


def test_version(capsys):
    name, version = printed_by(capsys, load_service, "trainer", ["--version"]).split()
    assert name == "keptset-trainer"
    assert version.count(".") == 2


def test_the_table_has_a_row_for_every_setting():
    rows = settings_table().splitlines()
    assert rows[:2] == ["| setting | type | default | meaning |", "|---|---|---|---|"]
    assert len(rows) == len(SETTINGS) + 2
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert any(
        row.startswith("| `inference.port` | whole number, 0 to 65535 | `8000` | Port to") for row in rows
    )
    bound = "| `trainer.loss.max_weight` (truncated_weight) | number, above 0 | `2.0` | Upper bound"
    assert any(row.startswith(bound) for row in rows)
    kinds = [row for row in rows if "`trainer.loss.kind`" in row]
    assert len(kinds) == 1
    assert '"clipped_ratio" or "truncated_weight" or "sequence_product" or "geometric_mean"' in kinds[0]
    assert any('`trainer.entropy` | number or "full" or "off" | `"full"`' in row for row in rows)
    directory = next(row for row in rows if "`trainer.output_dir`" in row)
    assert "runs/\\<name>/trainer" in directory  # a bare <name> would vanish as a tag
    assert "`Authorization: Bearer <key>`" in settings_table()


def test_the_module_prints_the_table():
    command = [sys.executable, "-m", "keptset_settings"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == settings_table()
