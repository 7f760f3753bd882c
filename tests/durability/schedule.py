"""When whom to kill: drawn from a seed, so that a failing draw can be made again."""

import random
from dataclasses import dataclass

VICTIMS = ("orchestrator", "trainer", "loop", "inference", "engine", "services", "keptset")
"""The three services; the trainer's loop; the engine's own process; all three at once; the supervisor, with
which everything goes."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL `seconds` after the row of `after_step` was written (0: after all services were healthy)."""

    after_step: int
    seconds: float
    victim: str

    def __str__(self) -> str:
        return f"{self.victim}, {self.seconds:.2f} s after step {self.after_step}"


def draw(seed: int, victims: list[str], steps: int, spread: float) -> list[Kill]:
    """A kill of each of these, at random moments of a run.

    Args:
        seed: Of the draw.
        victims: Whom, in any order; it is drawn as well.
        steps: Of the run.
        spread: Seconds after a step's row at most: about as long as a step takes, so that each of its phases
            is met.
    """
    dice = random.Random(seed)
    shuffled = dice.sample(victims, len(victims))
    moments = sorted((dice.randrange(steps - 1), dice.uniform(0, spread)) for _ in victims)
    return [Kill(step, seconds, victim) for (step, seconds), victim in zip(moments, shuffled, strict=True)]
