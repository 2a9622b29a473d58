"""One dispatch for every kernel: the XLA form, the TPU form or the GPU form of an operation.

A kernel module has up to three forms of one operation with the same arguments and results. The XLA
form is the specification. `dispatch` picks one when the program is *lowered*, so that one traced
program serves CPU, TPU and GPU; a form that is not lowered costs tracing time and nothing else.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

IMPLEMENTATIONS = ("xla", "pallas", None)

# Mosaic GPU kernels are written against plgpu.kernel, which exists from jax 0.11 on.
GPU_KERNELS = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)


class CompileCase(NamedTuple):
  """A function to compile for accelerators that need not be present.

  Attributes:
    name: unique name of the case, e.g. `"envelope 65536x2048x10"`.
    function: the function to jit.
    arguments: its positional arguments, pytrees of `jax.ShapeDtypeStruct`.
    targets: names of compile targets, e.g. `("v5e-1", "v6e-1", "h200")`.
    limits: upper bounds on figures of the compile report, e.g. `{"temp_bytes": 1 << 20}`.
  """

  name: str
  function: Callable
  arguments: tuple
  targets: tuple[str, ...]
  limits: dict[str, int] | None = None


def dispatch(
  *args: Any,
  xla: Callable,
  tpu: Callable,
  gpu: Callable,
  implementation: str | None = None,
  interpret: Any = None,
) -> Any:
  """Calls one form of an operation on `args`.

  Args:
    *args: arrays (pytrees), the same for every form.
    xla: the XLA form, called as `xla(*args)`.
    tpu: the `pl.pallas_call` form, called as `tpu(*args, interpret=...)`.
    gpu: the `plgpu.kernel` form, called as `gpu(*args, interpret=...)`. The XLA form takes its place
      on jax older than 0.11, and where a GPU of this process is older than Hopper (no TMA).
    implementation: `"xla"`; `"pallas"`, the kernel of the platform that the program is lowered for
      (lowering for a CPU is then an error); or None, the kernel on TPU and CUDA, XLA elsewhere.
    interpret: simulator parameters, with `implementation="pallas"` only: `pltpu.InterpretParams`
      runs the TPU form and `plgpu.InterpretGPUParams` the GPU form, on any platform.
  Returns:
    The result of the form.
  Raises:
    ValueError: `implementation` is unknown, or `interpret` does not fit it.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation is {implementation!r}, allowed are 'xla', 'pallas' and None; "
      "None picks per platform"
    )
  if interpret is not None:
    if implementation != "pallas":
      raise ValueError(
        f"interpret runs a kernel in its simulator, but implementation is {implementation!r}; "
        "pass implementation='pallas' with it"
      )
    return _simulated(args, tpu, gpu, interpret)
  if implementation == "xla":
    return xla(*args)
  branches = {
    "tpu": lambda *a: tpu(*a, interpret=False),
    "cuda": (lambda *a: gpu(*a, interpret=False)) if _hopper_or_absent() else xla,
  }
  if implementation is None:
    branches["default"] = xla
  return jax.lax.platform_dependent(*args, **branches)


@functools.cache
def _hopper_or_absent() -> bool:
  """Whether GPU kernels may be lowered; a process without a GPU compiles for one it has not."""
  if not GPU_KERNELS:
    return False
  try:
    gpus = jax.local_devices(backend="cuda")
  except RuntimeError:
    return True
  return all(float(gpu.compute_capability) >= 9.0 for gpu in gpus)


def _simulated(args: tuple, tpu: Callable, gpu: Callable, interpret: Any) -> Any:
  if isinstance(interpret, pltpu.InterpretParams):
    return tpu(*args, interpret=interpret)
  if GPU_KERNELS:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(interpret, plgpu.InterpretGPUParams):
      return gpu(*args, interpret=interpret)
  raise ValueError(
    f"interpret is {interpret!r}, allowed are pltpu.InterpretParams and, from jax 0.11 on, "
    f"plgpu.InterpretGPUParams; this is jax {jax.__version__}"
  )
