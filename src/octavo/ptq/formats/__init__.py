"""Layouts quantised checkpoints are written in: AWQ, GPTQ, compressed-tensors."""
