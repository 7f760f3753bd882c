"""vLLM behind FastAPI, answering with the kept set of every sampled token."""

__version__ = "0.1.0"

__all__ = ["__version__"]
