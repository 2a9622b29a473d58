"""Lipschitz envelopes of noisy samples, above and below, without the matrix of distances.

Arms x_i with bounds c_i <= f(x_i) <= b_i on an L-Lipschitz f confine it everywhere else:

  max_i(c_i - L·‖x - x_i‖)  <=  f(x)  <=  min_i(b_i + L·‖x - x_i‖)        (Euclidean distance)

Source: arXiv 2601.20231, eq. 2, for the upper envelope; the lower one is its mirror image.

Distances. ‖x‖² + ‖y‖² - 2x·y on the matrix unit loses every digit of a distance below 1e-3: in
float32, d = 10, it returns anything from 0 to 1.4e-3 for 1e-5. All forms therefore add up
(x_k - y_k)², exact to a few units in the last place for distances down to 1e-19, where squares
underflow. The matrix unit would not be faster by much: at d = 10 it works on a tenth of its depth,
in six passes for float32.

Cost for M queries, N arms, d dimensions, both envelopes: M·N·(3d + 10) FLOP, and at the least
4·(M·(d + 4) + N·(d + 3)) bytes of memory traffic, against 4·M·N more if distances were written.
At M = 65,536, N = 2,048, d = 10 that is 5.4 GFLOP and 3.8 MB, 1,400 FLOP per byte, so the vector
units are the roof: memory would be below 8 FLOP per byte on a v5e (6 TFLOP/s: 8 x 128 lanes of 4
ALUs at 1.5 GHz; 0.8 TB/s) and 14 on an H200 (67 TFLOP/s, 4.8 TB/s). The kernels read the arms once
per tile of queries, on a TPU in rows of 128 lanes: 134 MB, a sixth of the time of the arithmetic.
These are bounds by formula; no time on a device has been measured.

Memory beyond arguments and results at those sizes, where the distances take 512 MiB, as the
compilers report it (jax 0.11.2; `compile_cases` sets the limit, 5 % of 512 MiB):

                   v5e        v6e        H200
  envelope         382 KiB    384 KiB    3.25 MiB
  its gradient     0          0          4.69 MiB
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from foliax.kernels_pallas.dispatch import CompileCase, dispatch, vary_alike
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

# Distances of the XLA form live in a tile of this many elements: half a MB, what a core's second
# level of cache holds. Up to four tiles, one fused pass is faster than a loop.
_XLA_TILE = 1 << 17
_XLA_UNROLL = 8

# The kernels unroll over the dimensions; beyond this many, registers spill and code grows.
_MAX_DIMENSION = 128
_TPU_QUERIES, _TPU_ARMS, _SUBLANES = 512, 256, 8
_GPU_ARMS = 64
_NO_ARM = jnp.iinfo(jnp.int32).max


class Envelope(NamedTuple):
  """Bounds on a Lipschitz function at the queries.

  Attributes:
    upper: min_i(b_i + L·‖x - x_i‖); +inf where no arm is open.
    argmin: the first arm that attains `upper`; -1 where no arm is open.
    lower: max_i(c_i - L·‖x - x_i‖); -inf where no arm is open or no lower offsets were given.
  """

  upper: Float[Array, "m"]
  argmin: Int[Array, "m"]
  lower: Float[Array, "m"]


class _Forms(NamedTuple):
  """What every form returns: bounds and the first arm that attains them; None if not asked for."""

  upper: Any
  argmin: Any
  lower: Any
  argmax: Any


def envelope(
  queries: Float[Array, "m d"],
  arms: Float[Array, "n d"],
  upper_offsets: Float[Array, "n"],
  lipschitz: Float[Array, ""] | float | int,
  lower_offsets: Float[Array, "n"] | None = None,
  *,
  implementation: str | None = None,
  interpret: Any = None,
) -> Envelope:
  """Upper and lower Lipschitz envelope of the arms at the queries, in one pass.

  Never forms the M x N distances; the module's docstring has the cost and the memory.

  Differentiable in every array by the arms that attain the bounds: the subgradient of the first
  one on ties, and zero for a distance of zero. Batches under `vmap`. Sums run in float32 (float64
  if an argument is float64: XLA form only). Inside `jit` over several TPUs or GPUs, call it in a
  `jax.shard_map` over the queries, for compilers do not partition kernels.

  Args:
    queries: points x at which to bound, `[M, d]`, d >= 1, in any unit. A query that is not finite
      gets the bounds that say nothing: +inf, -1, -inf.
    arms: sampled points x_i, `[N, d]`, same unit. An arm that is not finite counts as unopened.
    upper_offsets: b_i `[N]`, upper bounds at the arms; +inf (or NaN) for an unopened arm.
    lipschitz: L >= 0, finite, in units of the bounds per unit of distance.
    lower_offsets: c_i `[N]`, lower bounds at the arms; -inf (or NaN) for an unopened arm.
    implementation: `"xla"`, `"pallas"` or None, which picks per platform: the kernel on TPUs and
      on GPUs from Hopper on, for float32 and d <= 128; XLA otherwise.
    interpret: simulator parameters that run a kernel on a CPU, see `dispatch`.
  Returns:
    The bounds `[M]` in float32 or float64.
  Raises:
    ValueError: shapes do not fit, a dtype is not floating, or the implementation is unknown or
      cannot do this.
  """
  dtype = _check(queries, arms, upper_offsets, lipschitz, lower_offsets)
  kernels = dtype == jnp.float32 and queries.shape[1] <= _MAX_DIMENSION
  if implementation == "pallas" and not kernels:
    raise ValueError(
      f"implementation is 'pallas' for d = {queries.shape[1]} in {dtype}, kernels exist for "
      f"d <= {_MAX_DIMENSION} in float32 and bfloat16; pass 'xla' or None"
    )
  if implementation is None and not kernels:
    implementation = "xla"
  lipschitz = jnp.asarray(lipschitz, dtype)
  return _envelope(
    queries, arms, upper_offsets, lipschitz, lower_offsets, dtype, implementation, interpret
  )


def _check(queries, arms, upper_offsets, lipschitz, lower_offsets) -> jnp.dtype:
  if queries.ndim != 2 or queries.shape[1] == 0:
    raise ValueError(f"queries has shape {queries.shape}, allowed is [M, d] with d >= 1")
  if arms.ndim != 2 or arms.shape[1] != queries.shape[1]:
    raise ValueError(
      f"arms has shape {arms.shape}, allowed is [N, {queries.shape[1]}] for queries of shape "
      f"{queries.shape}"
    )
  given = {"queries": queries, "arms": arms, "upper_offsets": upper_offsets}
  if lower_offsets is not None:
    given["lower_offsets"] = lower_offsets
  for name in ("upper_offsets", "lower_offsets"):
    if name in given and given[name].shape != arms.shape[:1]:
      raise ValueError(
        f"{name} has shape {given[name].shape}, allowed is {arms.shape[:1]}: one bound per arm"
      )
  if jnp.ndim(lipschitz) != 0:
    raise ValueError(
      f"lipschitz has shape {jnp.shape(lipschitz)}, allowed is a scalar; use vmap for several"
    )
  for name, array in given.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} has dtype {array.dtype}, allowed are floating dtypes; convert it")
  return jnp.promote_types(jnp.result_type(*given.values()), jnp.float32)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation", "interpret"))
def _envelope(
  queries, arms, upper_offsets, lipschitz, lower_offsets, dtype, implementation, interpret
) -> Envelope:
  def offsets(values, unopened):
    usable = jnp.isfinite(arms).all(axis=1) & ~jnp.isnan(values)
    return jnp.where(usable, values, unopened).astype(dtype)

  finite = jnp.isfinite(queries).all(axis=1)
  clean = lambda points: jnp.where(jnp.isfinite(points), points, 0).astype(dtype)
  upper_offsets = offsets(upper_offsets, jnp.inf)
  if lower_offsets is not None:
    lower_offsets = offsets(lower_offsets, -jnp.inf)
  if queries.shape[0] == 0 or arms.shape[0] == 0:
    implementation, interpret = "xla", None
  args = (clean(queries), clean(arms), upper_offsets, lipschitz, lower_offsets)
  upper, argmin, lower, _ = _bounds(implementation, interpret, *vary_alike(args))
  if lower is None:
    lower = jnp.full_like(upper, -jnp.inf)
  upper = jnp.where(finite, upper, jnp.inf)
  argmin = jnp.where(upper < jnp.inf, argmin, -1)
  return Envelope(upper, argmin, jnp.where(finite, lower, -jnp.inf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bounds(
  implementation, interpret, queries, arms, upper_offsets, lipschitz, lower_offsets
) -> _Forms:
  return dispatch(
    queries,
    arms,
    upper_offsets,
    lipschitz,
    lower_offsets,
    xla=_xla_form,
    tpu=_tpu_form,
    gpu=_gpu_form,
    implementation=implementation,
    interpret=interpret,
  )


def _bounds_forward(implementation, interpret, *args):
  out = _bounds(implementation, interpret, *args)
  return out, (args, out)


def _bounds_backward(implementation, interpret, residuals, cotangents):
  """Every bound depends on its query, the one arm that attains it, that arm's offset, and L."""
  (queries, arms, upper_offsets, lipschitz, _), out = residuals
  grad_queries, grad_arms = jnp.zeros_like(queries), jnp.zeros_like(arms)
  grad_lipschitz = jnp.zeros_like(lipschitz)
  grad_offsets = []
  for sign, bound, index, cotangent in (
    (1.0, out.upper, out.argmin, cotangents.upper),
    (-1.0, out.lower, out.argmax, cotangents.lower),
  ):
    if bound is None:
      grad_offsets.append(None)
      continue
    if arms.shape[0] == 0:
      grad_offsets.append(jnp.zeros_like(upper_offsets))
      continue
    attained = jnp.isfinite(bound)
    index = jnp.where(attained, index, 0)
    cotangent = jnp.where(attained, cotangent, 0)
    difference = queries - arms[index]
    square = jnp.sum(difference**2, axis=1)
    distance = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    direction = difference / jnp.where(square > 0, distance, 1)[:, None]
    pull = jnp.where((square > 0)[:, None], sign * lipschitz * cotangent[:, None] * direction, 0)
    grad_queries += pull
    grad_arms = grad_arms.at[index].add(-pull)
    grad_offsets.append(jnp.zeros_like(upper_offsets).at[index].add(cotangent))
    grad_lipschitz += sign * jnp.sum(cotangent * distance)
  return grad_queries, grad_arms, grad_offsets[0], grad_lipschitz, grad_offsets[1]


_bounds.defvjp(_bounds_forward, _bounds_backward)


def _xla_form(queries, arms, upper_offsets, lipschitz, lower_offsets) -> _Forms:
  (m, d), n = queries.shape, arms.shape[0]
  if m == 0 or n == 0:
    upper, index = jnp.full((m,), jnp.inf, queries.dtype), jnp.full((m,), -1, jnp.int32)
    return _Forms(upper, index, *((None, None) if lower_offsets is None else (-upper, index)))
  tile = functools.partial(_xla_tile, arms, upper_offsets, lipschitz, lower_offsets)
  if m * n <= 4 * _XLA_TILE:
    return tile(queries)
  rows = max(8, _XLA_TILE // n)
  tiles = jnp.pad(queries, ((0, -m % rows), (0, 0))).reshape(-1, rows, d)
  return jax.tree.map(lambda x: x.reshape(-1)[:m], jax.lax.map(tile, tiles))


def _xla_tile(arms, upper_offsets, lipschitz, lower_offsets, queries) -> _Forms:
  # Coordinates first, so that the inner loop runs along arms; the barriers keep XLA from undoing it
  # and from computing the distances once more for each reduction.
  queries, arms = jax.lax.optimization_barrier((queries.T, arms.T))

  square = lambda k: (queries[k][:, None] - arms[k][None, :]) ** 2
  d, squares = queries.shape[0], square(0)
  if d <= _XLA_UNROLL:
    for k in range(1, d):
      squares += square(k)
  else:
    squares = jax.lax.fori_loop(1, d, lambda k, total: total + square(k), squares)
  rise = jax.lax.optimization_barrier(lipschitz * jnp.sqrt(squares))
  index = jnp.arange(arms.shape[1], dtype=jnp.int32)

  def first(values, bound):
    return jnp.min(jnp.where(values == bound[:, None], index, _NO_ARM), axis=1)

  above = upper_offsets + rise
  upper = above.min(axis=1)
  if lower_offsets is None:
    return _Forms(upper, first(above, upper), None, None)
  below = lower_offsets - rise
  lower = below.max(axis=1)
  return _Forms(upper, first(above, upper), lower, first(below, lower))


def _pack(arms, upper_offsets, lipschitz, lower_offsets, *, rows: int, columns: int):
  """One array of arms for a kernel: coordinates, b_i, L, c_i; rows added are unopened arms."""
  n = arms.shape[0]
  offsets = [upper_offsets, jnp.full_like(upper_offsets, lipschitz)]
  if lower_offsets is not None:
    offsets.append(lower_offsets)
  pad = ((0, -n % rows),)
  neutral = (jnp.inf, 0.0, -jnp.inf)
  packed = [jnp.pad(arms, (*pad, (0, 0)))]
  packed += [
    jnp.pad(x, pad, constant_values=fill)[:, None]
    for x, fill in zip(offsets, neutral, strict=False)
  ]
  packed = jnp.concatenate(packed, axis=1)
  return jnp.pad(packed, ((0, 0), (0, -packed.shape[1] % columns)))


def _better(bound, index, candidate, candidate_index, sign):
  """Keeps the better of two bounds; `sign` is 1 for the least, -1 for the greatest. Ties keep."""
  better = sign * candidate < sign * bound
  return jnp.where(better, candidate, bound), jnp.where(better, candidate_index, index)


def _tpu_form(
  queries, arms, upper_offsets, lipschitz, lower_offsets, *, interpret: Any = False
) -> _Forms:
  """Queries along lanes, eight arms along sublanes, so that a running bound needs no reduction.

  The grid is (tiles of queries, tiles of arms); results stay in VMEM over the tiles of arms. The
  last tile of queries may hang over the end: its lanes never meet and are not written back.
  """
  (m, d), signs = queries.shape, (1.0,) if lower_offsets is None else (1.0, -1.0)
  block = min(_TPU_ARMS, -(-arms.shape[0] // _SUBLANES) * _SUBLANES)
  packed = _pack(arms, upper_offsets, lipschitz, lower_offsets, rows=block, columns=1)
  lanes = min(_TPU_QUERIES, -(-m // 128) * 128)
  semantics = ("parallel", "arbitrary")
  row = pl.BlockSpec((1, lanes), lambda i, j: (0, i))
  args = (queries, arms, upper_offsets, lipschitz, lower_offsets)
  # From the XLA form, for inside a shard_map they must say along which mesh axes results vary.
  types = jax.eval_shape(lambda *a: [x[None] for x in jax.tree.leaves(_xla_form(*a))], *args)
  out = pl.pallas_call(
    functools.partial(_tpu_body, d, signs),
    grid=(pl.cdiv(m, lanes), packed.shape[0] // block),
    in_specs=[
      pl.BlockSpec((d, lanes), lambda i, j: (0, i)),
      pl.BlockSpec((block, packed.shape[1]), lambda i, j: (j, 0)),
    ],
    out_specs=[row] * len(types),
    out_shape=types,
    # The simulator does not expect the axis that vmap adds to the grid.
    compiler_params=None if interpret else pltpu.CompilerParams(dimension_semantics=semantics),
    cost_estimate=pl.CostEstimate(
      flops=m * arms.shape[0] * (3 * d + 5 * len(signs)),
      transcendentals=m * arms.shape[0],
      bytes_accessed=4 * (m * (d + 2 * len(signs)) + packed.size),
    ),
    interpret=interpret,
    name="envelope",
  )(queries.T, packed)
  out = [x[0] for x in out]
  return _Forms(*out, *(None,) * (4 - len(out)))


def _tpu_body(d, signs, queries_ref, packed_ref, *out_refs):
  lanes, block = queries_ref.shape[1], packed_ref.shape[0]
  shape = (_SUBLANES, lanes)
  base = pl.program_id(1) * block
  sublane = jax.lax.broadcasted_iota(jnp.int32, shape, 0)

  @pl.when(pl.program_id(1) == 0)
  def _():
    for sign, bound_ref, index_ref in zip(signs, out_refs[::2], out_refs[1::2], strict=True):
      bound_ref[...] = jnp.full((1, lanes), sign * jnp.inf, bound_ref.dtype)
      index_ref[...] = jnp.full((1, lanes), _NO_ARM, jnp.int32)

  def strip(s, best):
    start = pl.multiple_of(s * _SUBLANES, _SUBLANES)
    arms = packed_ref[pl.ds(start, _SUBLANES), :]
    squares = jnp.zeros(shape, arms.dtype)
    for k in range(d):
      squares += (queries_ref[k : k + 1, :] - arms[:, k : k + 1]) ** 2
    rise = arms[:, d + 1 : d + 2] * jnp.sqrt(squares)
    index = base + start + sublane
    candidates = (arms[:, d : d + 1] + rise, arms[:, -1:] - rise)
    return tuple(
      _better(*pair, candidate, index, sign)
      for pair, candidate, sign in zip(best, candidates, signs, strict=False)
    )

  start = tuple(
    (jnp.full(shape, sign * jnp.inf), jnp.full(shape, _NO_ARM, jnp.int32)) for sign in signs
  )
  best = jax.lax.fori_loop(0, block // _SUBLANES, strip, start)
  for sign, pair, bound_ref, index_ref in zip(
    signs, best, out_refs[::2], out_refs[1::2], strict=True
  ):
    bound = (jnp.min if sign > 0 else jnp.max)(pair[0], axis=0, keepdims=True)
    index = jnp.min(jnp.where(pair[0] == bound, pair[1], _NO_ARM), axis=0, keepdims=True)
    bound_ref[...], index_ref[...] = _better(bound_ref[...], index_ref[...], bound, index, sign)


def _gpu_form(
  queries, arms, upper_offsets, lipschitz, lower_offsets, *, interpret: Any = None
) -> _Forms:
  """One thread per query or two; the arms stream through shared memory, read by all alike.

  A block of 128 threads holds its queries and running bounds in registers, so nothing is reduced
  across threads. Tiles of arms arrive by TMA, the next one while this one is used.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  (m, d), signs = queries.shape, (1.0,) if lower_offsets is None else (1.0, -1.0)
  lanes = 256 if d <= 32 and m > 128 else 128
  # TMA moves rows of a multiple of 16 bytes.
  packed = _pack(arms, upper_offsets, lipschitz, lower_offsets, rows=_GPU_ARMS, columns=4)
  padded = jnp.pad(queries.T, ((0, 0), (0, -m % lanes)))
  types = [
    jax.ShapeDtypeStruct(padded.shape[1:], dtype)
    for _ in signs
    for dtype in (queries.dtype, jnp.int32)
  ]
  out = plgpu.kernel(
    functools.partial(_gpu_body, d, signs, lanes),
    out_type=types,
    scratch_types=[
      plgpu.SMEM((2, _GPU_ARMS, packed.shape[1]), packed.dtype),
      plgpu.Barrier(num_barriers=2),
    ],
    grid=(padded.shape[1] // lanes,),
    grid_names=("tile",),
    interpret=interpret,
    kernel_name="envelope",
  )(padded, packed)
  out = [x[:m] for x in out]
  return _Forms(*out, *(None,) * (4 - len(out)))


def _gpu_body(d, signs, lanes, queries_ref, packed_ref, *refs):
  from jax.experimental.pallas import mosaic_gpu as plgpu

  *out_refs, arms_ref, arrived = refs
  layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=lanes // 128)
  here = pl.ds(jax.lax.axis_index("tile") * lanes, lanes)
  queries = [plgpu.load(queries_ref.at[k, here], layout=layout) for k in range(d)]
  full = lambda value, dtype: plgpu.layout_cast(jnp.full((lanes,), value, dtype), layout)
  tiles = packed_ref.shape[0] // _GPU_ARMS

  def fetch(tile, slot):
    rows = packed_ref.at[pl.ds(tile * _GPU_ARMS, _GPU_ARMS)]
    plgpu.copy_gmem_to_smem(rows, arms_ref.at[slot], arrived.at[slot])

  def use_tile(tile, best):
    slot = jax.lax.rem(tile, 2)

    @pl.when(tile + 1 < tiles)
    def _():
      # Orders the reads of the tile before, which had this slot, against the copy that replaces it.
      plgpu.commit_smem()
      fetch(tile + 1, 1 - slot)

    plgpu.barrier_wait(arrived.at[slot])

    def use_arm(j, best):
      squares = full(0.0, jnp.float32)
      for k in range(d):
        squares += (queries[k] - arms_ref[slot, j, k]) ** 2
      rise = arms_ref[slot, j, d + 1] * jnp.sqrt(squares)
      index = tile * _GPU_ARMS + j
      result = [_better(*best[0], arms_ref[slot, j, d] + rise, index, signs[0])]
      if len(signs) == 2:
        result.append(_better(*best[1], arms_ref[slot, j, d + 2] - rise, index, signs[1]))
      return tuple(result)

    return jax.lax.fori_loop(0, _GPU_ARMS, use_arm, best)

  fetch(0, 0)
  start = tuple((full(sign * jnp.inf, jnp.float32), full(_NO_ARM, jnp.int32)) for sign in signs)
  best = jax.lax.fori_loop(0, tiles, use_tile, start)
  for ref, value in zip(out_refs, [x for pair in best for x in pair], strict=True):
    ref[here] = value


def _width(*args):
  """Sum of the distances between the envelopes: a number to differentiate."""
  out = envelope(*args)
  return jnp.sum(out.upper - out.lower)


def compile_cases() -> list[CompileCase]:
  """Both envelopes of 65,536 queries and 2,048 arms in 10 dimensions, and more of them.

  The limit on temporary memory is 5 % of the distance matrix that is never written.
  """
  m, n, d = 65_536, 2_048, 10
  shapes = ((m, d), (n, d), (n,), (), (n,))
  limits = {"temp_bytes": 4 * m * n // 20}
  targets = ("v5e-1", "v6e-1", "h200")
  mesh = jax.sharding.AbstractMesh((4,), ("queries",))
  split, whole = jax.sharding.PartitionSpec("queries"), jax.sharding.PartitionSpec()
  specs = (split, whole, whole, whole, whole)
  sharded = jax.shard_map(envelope, in_specs=specs, out_specs=split)

  def structs(batch=(), specs=None):
    shardings = specs and [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    return tuple(
      jax.ShapeDtypeStruct(batch + shape, jnp.float32, sharding=shardings and shardings[i])
      for i, shape in enumerate(shapes)
    )

  size = f"{m}x{n}x{d}"
  return [
    CompileCase(f"envelope {size}", envelope, structs(), targets, limits),
    CompileCase(f"envelope gradient {size}", jax.grad(_width), structs(), targets, limits),
    CompileCase(f"envelope batch 4x{size}", jax.vmap(envelope), structs((4,)), targets, limits),
    CompileCase(
      f"envelope sharded {size}", sharded, structs(specs=specs), ("v5e-4", "h200x4"), limits
    ),
  ]
