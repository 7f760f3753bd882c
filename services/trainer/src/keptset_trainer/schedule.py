"""The learning rate of a step, from its number alone: nothing of it need be remembered in a checkpoint."""

import math

from keptset_settings import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Of step `step`, the first of which is 1.

    It rises in equal parts over `warmup_steps`, of which the last one has all of `lr`, and falls from there
    so that the step after `decay_steps` is the first with `min_lr`: no step within them does nothing.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    assert settings.decay_steps is not None
    after = settings.decay_steps - settings.warmup_steps
    done = min(1.0, (step - 1 - settings.warmup_steps) / after)
    left = 1.0 - done if settings.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left
