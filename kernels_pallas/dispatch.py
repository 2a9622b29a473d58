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
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

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
    takes_minutes: compiled only when its owner is asked for by name.
  """

  name: str
  function: Callable
  arguments: tuple
  targets: tuple[str, ...]
  limits: dict[str, int] | None = None
  takes_minutes: bool = False


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
    gpu: the `plgpu.kernel` form, called as `gpu(*args, interpret=...)`. The XLA form takes its
      place on jax older than 0.11, and where a GPU of this process is older than Hopper (no TMA).
    implementation: `"xla"`; `"pallas"`, the kernel of the platform that the program is lowered for,
      and an error when it is lowered for a CPU; or None, the kernel on TPU and CUDA, XLA elsewhere.
    interpret: simulator parameters, with `implementation="pallas"` only: `pltpu.InterpretParams`
      runs the TPU form and `plgpu.InterpretGPUParams` the GPU form, on any platform.
  Returns:
    The result of the form.
  Raises:
    ValueError: `implementation` is unknown, `interpret` does not fit it, or the program is lowered
      for a platform that has no kernels.
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
    if _simulated(interpret) == "tpu":
      return tpu(*args, interpret=interpret)
    return _gpu_varying(xla, gpu, *args, interpret=interpret)
  if implementation == "xla":
    return xla(*args)
  branches = {
    "tpu": lambda *a: tpu(*a, interpret=False),
    "cuda": functools.partial(_gpu_varying, xla, gpu, interpret=None)
    if _hopper_or_absent()
    else xla,
  }
  default = xla if implementation is None else functools.partial(_refuse, xla)
  return jax.lax.platform_dependent(*args, default=default, **branches)


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


def _simulated(interpret: Any) -> str:
  """Which form the simulator parameters are for."""
  if isinstance(interpret, pltpu.InterpretParams):
    return "tpu"
  if GPU_KERNELS:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(interpret, plgpu.InterpretGPUParams):
      return "gpu"
  raise ValueError(
    f"interpret is {interpret!r}, allowed are pltpu.InterpretParams and, from jax 0.11 on, "
    f"plgpu.InterpretGPUParams; this is jax {jax.__version__}"
  )


def _gpu_varying(xla: Callable, gpu: Callable, *args: Any, interpret: Any) -> Any:
  """The GPU form, its results marked as varying over the mesh axes that those of XLA vary over.

  plgpu.kernel drops the marks that shard_map needs to tell sharded from replicated values.
  """

  mark = lambda result, like: _varying(result, _axes(like))
  return jax.tree.map(mark, gpu(*args, interpret=interpret), jax.eval_shape(xla, *args))


def vary_alike(arrays: Any) -> Any:
  """Marks all arrays of a pytree as varying over the mesh axes that any of them varies over.

  Inside a shard_map, a custom_vjp whose arguments are partly sharded, partly replicated would have
  to sum some gradients over the mesh; behind this function JAX does so itself. Elsewhere it does
  nothing.
  """
  axes = frozenset().union(*(_axes(jax.typeof(x)) for x in jax.tree.leaves(arrays)))
  return jax.tree.map(lambda x: _varying(x, axes), arrays)


def _axes(array_type: Any) -> frozenset:
  """The mesh axes that an array of this type varies over; none outside of shard_map."""
  manual = array_type.manual_axis_type
  return frozenset() if manual is None else manual.varying


def _varying(array: jax.Array, axes: frozenset) -> jax.Array:
  axes = axes - _axes(jax.typeof(array))
  return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array


# Stands where a kernel is missing. What platform a program is lowered for is not known while it is
# traced, so only the lowering of this primitive can refuse, in words that say what to do.
_no_kernel = Primitive("no_kernel")
_no_kernel.multiple_results = True
_no_kernel.def_abstract_eval(
  lambda *_, types: [jax.core.ShapedArray(shape, dtype) for shape, dtype in types]
)


def _refuse(xla: Callable, *args: Any) -> Any:
  leaves, treedef = jax.tree.flatten(jax.eval_shape(xla, *args))
  types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
  return treedef.unflatten(_no_kernel.bind(*jax.tree.leaves(args), types=types))


def _refuse_batched(args, axes, *, types):
  size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
  types = tuple(((size, *shape), dtype) for shape, dtype in types)
  return _no_kernel.bind(*args, types=types), [0] * len(types)


def _refuse_lowering(context, *args, types):
  raise ValueError(
    f"implementation is 'pallas' on {context.module_context.platforms}, kernels exist for TPU and "
    "for CUDA; pass None or 'xla', or simulator parameters as interpret"
  )


batching.primitive_batchers[_no_kernel] = _refuse_batched
mlir.register_lowering(_no_kernel, _refuse_lowering)
