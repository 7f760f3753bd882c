"""What every request passes before a service looks at it: secrets, sizes, rates. And whose turn a GPU is."""

from .access import AccessGuard, Secret
from .body import BodyGuard
from .caller import CallerLeft, while_asked
from .errors import UNROUTED, error_body, error_type
from .gpu import GpuTurn
from .load import LoadGuard, Turns
from .texts import without_paths

__all__ = [
    "UNROUTED",
    "AccessGuard",
    "BodyGuard",
    "CallerLeft",
    "GpuTurn",
    "LoadGuard",
    "Secret",
    "Turns",
    "error_body",
    "error_type",
    "while_asked",
    "without_paths",
]
