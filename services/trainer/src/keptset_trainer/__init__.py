"""Trains on rollouts with the kept-set logprob and publishes weights by version."""

from importlib.metadata import version

__version__ = version("keptset-trainer")
__all__ = ["__version__"]
