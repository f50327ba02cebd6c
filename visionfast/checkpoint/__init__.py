"""Opens weights files that nobody vouches for.

A `.pt` is a pickle, and a pickle may run anything. Here it is read as data (`visionfast.checkpoint.pickled`):
the classes that a checkpoint names are never imported or built on its word, and a name that no weights file
needs is refused. Legacy (before PyTorch 1.6) files and TorchScript programs are not read.
"""

from visionfast.checkpoint.opening import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
