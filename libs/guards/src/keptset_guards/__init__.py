"""What every request passes before a service looks at it: secrets, sizes, rates."""

from .access import AccessGuard, Secret
from .body import BodyGuard
from .load import LoadGuard, Turns
from .texts import without_paths

__all__ = ["AccessGuard", "BodyGuard", "LoadGuard", "Secret", "Turns", "without_paths"]
