"""What stops a run. Each text is a line that names the peer or source, what happened and the way out."""


class OrchestratorError(RuntimeError):
    """The run cannot go on; the text is what a user reads."""


class PeerUnavailableError(OrchestratorError):
    """A peer did not answer in the time that the settings give it."""


class PeerRefusedError(OrchestratorError):
    """A peer answered 4xx: the request or the configuration is at fault, asking again would not help.

    Attributes:
        said: The peer's own words.
    """

    def __init__(self, text: str, said: str = "") -> None:
        """`text` names the peer and the request, and has what it said."""
        super().__init__(text)
        self.said = said


class OtherVersionError(PeerRefusedError):
    """The trainer holds later weights than are asked for by now; those are published as files."""


class TransferFailedError(PeerUnavailableError):
    """Weights did not get from the trainer to all servers.

    Attributes:
        trainer_lost: the trainer is gone, or was started again; otherwise a server may be.
    """

    def __init__(self, text: str, *, trainer_lost: bool) -> None:
        """`text` has what each of them says."""
        super().__init__(text)
        self.trainer_lost = trainer_lost


class PeerMismatchError(OrchestratorError):
    """A peer is up but cannot serve this run: no capture for a truncating source, another vocabulary, ..."""


class AnswerError(OrchestratorError):
    """An answer breaks rule 3 or 4 of the kept set, or the route's contract. Nothing of it is trained on."""


class OtherWeightsError(AnswerError):
    """A token was sampled with weights that its server should not have carried."""


class RolloutFailedError(OrchestratorError):
    """A group could not be sampled within the attempts that the settings give it."""


class EnvironmentFaultError(OrchestratorError):
    """An environment raised, or its reward is not a finite number."""


class DiskError(OrchestratorError):
    """The disk did not take or give a file of the run; everything acknowledged is there."""
