"""Sampling: the parameters of a request, the per-sequence sampling state, and the rows handed to the native sampler."""
