"""The one error that reading or checking a payload raises."""


class KeptTokensError(ValueError):
    """A payload that cannot be used as it is.

    The text names the field, the position, the value and the way out; the same facts are attributes, so that
    a service can answer with them.

    Attributes:
        field: the field that is wrong, such as ``"counts"``.
        position: the token position (from 0) inside its sample or payload, or None if there is no single one.
        sample_index: the sample inside its batch, or None outside a batch.
        sample_id: the id that the sample carries, or None outside a sample.
    """

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        position: int | None = None,
        sample_index: int | None = None,
        sample_id: str | None = None,
    ) -> None:
        """Compose the text: ``sample 3 (id 'x'): counts at position 7: problem``."""
        self.field = field
        self.problem = problem
        self.position = position
        self.sample_index = sample_index
        self.sample_id = sample_id
        where = field if position is None else f"{field} at position {position}"
        if sample_id is not None or sample_index is not None:
            number = "" if sample_index is None else f" {sample_index}"
            name = "" if sample_id is None else f" (id {sample_id!r})"
            where = f"sample{number}{name}: {where}"
        super().__init__(f"{where}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the attributes when the error crosses a process."""
        return _rebuild, (self.field, self.problem, self.position, self.sample_index, self.sample_id)

    def in_sample(self, sample_id: str, sample_index: int | None = None) -> "KeptTokensError":
        """The same error, said of a sample."""
        return KeptTokensError(
            self.field, self.problem, position=self.position, sample_index=sample_index, sample_id=sample_id
        )


def _rebuild(
    field: str, problem: str, position: int | None, sample_index: int | None, sample_id: str | None
) -> KeptTokensError:
    return KeptTokensError(field, problem, position=position, sample_index=sample_index, sample_id=sample_id)
