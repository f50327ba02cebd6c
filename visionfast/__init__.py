"""visionfast: vision checkpoints, unchanged, compiled and served as fast as the machine allows."""

from visionfast._version import __version__

__all__ = ["__version__"]
