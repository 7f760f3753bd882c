"""The one error of this library: every problem that was found, a line each."""


class SettingsError(ValueError):
    """Settings that cannot be used.

    `problems` holds one line each: the field as a TOML path, the value, what is wrong, the way out.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
