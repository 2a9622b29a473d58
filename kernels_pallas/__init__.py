"""Kernels: one operation per module, each with an XLA form (the specification), a TPU and a GPU form."""
