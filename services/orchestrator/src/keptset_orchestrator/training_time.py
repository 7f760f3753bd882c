"""How long a trainer is waited for that trains one step after the other."""

import time


class TrainingTime:
    """So many seconds, and as many again for each further step that the trainer comes to.

    A trainer that was started again is at earlier steps first, up to trainer.checkpoint_interval of them. A
    step gives time once, lest a trainer that dies again and again is waited for without end; those after a
    step that is new are still to be trained once more, and give it again.

    Args:
        seconds: Of one step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at: int | None = None
        """The step that the trainer was seen at last; None: it has not said."""
        self._deadline = time.monotonic() + seconds
        self._seen: set[int] = set()

    @property
    def left(self) -> float:
        """Seconds; at most 0 if the time is over."""
        return self._deadline - time.monotonic()

    def see(self, step: int | None) -> None:
        """The trainer says that it is at `step`; None: it does not say."""
        if step is None:
            return
        self.at = step
        if step in self._seen:
            return
        if self._seen:
            self._deadline = time.monotonic() + self.seconds
        self._seen = {earlier for earlier in self._seen if earlier < step} | {step}
