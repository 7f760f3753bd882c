"""Settings back into TOML, without secrets."""

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import tomli_w
from pydantic import SecretStr

from .base import OFF, Table
from .inference import InferenceSettings
from .run import RunSettings

PREFIX = "KEPTSET_"
DELIMITER = "__"


def to_toml(settings: Table, table: str | None = None) -> str:
    """TOML that loads to equal settings, but for secrets: those are left out and a comment says so.

    With `table`, everything is put below that table: `to_toml(run.inference, "inference")`.
    """
    comments = [
        f"# {'.'.join(path)} is set but never written; give it as {variable(path)}\n"
        for path, _ in secrets(settings, table)
    ]
    content = to_plain(settings)
    return "".join(comments) + tomli_w.dumps({table: content} if table else content)


def write_service_configs(run: RunSettings, directory: Path) -> list[Path]:
    """Write a resolved run's inference-N.toml, orchestrator.toml and trainer.toml; returns their paths.

    There is an inference-N.toml for each of orchestrator.inference_urls. Where there are several, each
    listens on the port that its URL names; the rest is the same for all.

    Secrets are left out: they travel as environment variables, see `service_environment`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    services: list[tuple[str, str, Table]] = [
        (f"inference-{node}", "inference", settings) for node, settings in enumerate(inference_nodes(run))
    ]
    services += [("orchestrator", "orchestrator", run.orchestrator), ("trainer", "trainer", run.trainer)]
    for name, table, settings in services:
        path = directory / f"{name}.toml"
        path.write_text(to_toml(settings, table), encoding="utf-8")
        written.append(path)
    return written


def inference_nodes(run: RunSettings) -> list[InferenceSettings]:
    """The settings of each inference server of a resolved run."""
    urls = run.orchestrator.inference_urls
    if len(urls) == 1:
        return [run.inference]
    ports = [urlsplit(url).port or run.inference.port for url in urls]
    return [run.inference.model_copy(update={"port": port}) for port in ports]


def service_environment(run: RunSettings, service: str) -> dict[str, str]:
    """The secrets of one service's settings as environment variables, to go with its written file.

    Whoever starts the service should keep other KEPTSET_ variables from it: they win over its file, and were
    taken into account when the run was resolved.
    """
    found = secrets(getattr(run, service), service)
    return {variable(path): secret.get_secret_value() for path, secret in found}


def secrets(settings: Table, table: str | None = None) -> Iterator[tuple[tuple[str, ...], SecretStr]]:
    """The secrets that are set, with their paths."""
    root = (table,) if table else ()
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            yield (*root, name), value
        elif isinstance(value, Table):
            yield from (((*root, *path), secret) for path, secret in secrets(value, name))


def variable(path: tuple[str, ...]) -> str:
    """The environment variable of a setting: KEPTSET_INFERENCE__PORT for inference.port."""
    return PREFIX + DELIMITER.join(path).upper()


def to_plain(value: Any) -> Any:
    """Tables, paths and tuples as what TOML has; what is unset or empty by default is left out."""
    if isinstance(value, Table):
        content = {}
        for name, field in type(value).model_fields.items():
            plain = to_plain(getattr(value, name))
            if plain is None and OFF in field.metadata:
                plain = "off"
            if plain is not None and plain != {}:
                content[name] = plain
        return content
    if isinstance(value, SecretStr):
        return None
    if isinstance(value, dict):
        return {key: to_plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value.as_posix() if isinstance(value, PurePath) else value
