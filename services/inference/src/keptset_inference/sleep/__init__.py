"""Turns on a GPU: the engine's memory leaves it while somebody else works there."""
