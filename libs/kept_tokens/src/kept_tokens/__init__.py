"""The kept-token payload that travels through rollout, orchestrator and trainer."""

from .errors import KeptTokensError
from .payload import KeptTokens

__all__ = ["KeptTokens", "KeptTokensError"]
