"""What stops a run. Each text is a line that names the peer or source, what happened and the way out."""


class OrchestratorError(RuntimeError):
    """The run cannot go on; the text is what a user reads."""


class PeerUnavailableError(OrchestratorError):
    """A peer did not answer in the time that the settings give it."""


class PeerRefusedError(OrchestratorError):
    """A peer answered 4xx: the request or the configuration is at fault, asking again would not help."""


class PeerMismatchError(OrchestratorError):
    """A peer is up but cannot serve this run: no capture for a truncating source, another vocabulary, ..."""


class AnswerError(OrchestratorError):
    """An answer breaks rule 3 or 4 of the kept set, or the route's contract. Nothing of it is trained on."""


class RolloutFailedError(OrchestratorError):
    """A group could not be sampled within the attempts that the settings give it."""


class EnvironmentFaultError(OrchestratorError):
    """An environment raised, or its reward is not a finite number."""
