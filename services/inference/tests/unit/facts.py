"""Facts about an engine that is not there."""

from keptset_inference.state import EngineFacts


def facts(**changes) -> EngineFacts:
    """A small engine that captures 512 ids of a vocabulary of 1000."""
    values = {
        "model": "/models/tiny",
        "served_names": ("/models/tiny",),
        "vocab_size": 1000,
        "max_model_len": 64,
        "width": 512,
        "capture": "v1",
    }
    return EngineFacts(**values | changes)
