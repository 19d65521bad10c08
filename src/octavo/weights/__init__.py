"""Where tensors come from: safetensors directories, GGUF files, and the look-up of models by name."""

from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.tensors import AffineRows, AffineTensor, DenseTensor, Tensor

__all__ = ["AffineRows", "AffineTensor", "Checkpoint", "DenseTensor", "Tensor", "open_checkpoint"]
