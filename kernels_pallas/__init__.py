"""Kernels, one operation per module: an XLA form, which is the specification, TPU and GPU forms."""
