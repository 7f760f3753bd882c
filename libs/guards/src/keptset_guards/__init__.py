"""What every request passes before a service looks at it: secrets, sizes, rates."""

from .access import AccessGuard, Secret
from .body import BodyGuard
from .load import LoadGuard, Turns

__all__ = ["AccessGuard", "BodyGuard", "LoadGuard", "Secret", "Turns"]
