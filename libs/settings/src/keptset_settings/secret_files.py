"""Secrets whose variable names a file: KEPTSET_INFERENCE__API_KEY_FILE=/run/secrets/key.

That is how Docker and Kubernetes hand secrets out: in files, which `docker inspect` and /proc do not show.
"""

from collections.abc import Mapping
from pathlib import Path

from .errors import Path as SettingPath
from .errors import Problem, SettingsError
from .run import RunSettings
from .schema import is_secret, settings
from .toml import secrets, variable

SUFFIX = "_FILE"


def secret_file_variables() -> dict[str, tuple[str, ...]]:
    """Name of each such variable -> path of its setting."""
    return {
        variable(setting.path) + SUFFIX: setting.path
        for setting in settings(RunSettings)
        if is_secret(setting.field.annotation)
    }


def secret_variables() -> set[str]:
    """Names of all variables that may hold a secret or name its file."""
    files = secret_file_variables()
    return files.keys() | {variable(path) for path in files.values()}


def set_secrets(run: RunSettings) -> list[str]:
    """The variables of the secrets that a run has."""
    return [variable(path) for path, _ in secrets(run)]


def read_secret_files(environment: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Path of each setting whose file is named -> what the file holds, without the last line break.

    Raises:
        SettingsError: a file that cannot be read or is empty, or a secret that is given in both ways.
    """
    known, found, problems = secret_file_variables(), dict[tuple[str, ...], str](), list[Problem]()
    for name, file in environment.items():
        path: SettingPath | None = known.get(name.upper())
        if path is None or not file:
            continue
        plain = name[: -len(SUFFIX)]
        try:
            text = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            problems.append(Problem(path, f"{file} cannot be read: {reason}", origin=name))
            continue
        if not text:
            problems.append(Problem(path, f"{file} is empty; write the secret into it", origin=name))
        elif environment.get(plain):
            problems.append(Problem(path, f"{plain} is set too; unset one of them", origin=name))
        else:
            found[known[name.upper()]] = text
    if problems:
        raise SettingsError(problems)
    return found
