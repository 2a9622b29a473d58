"""Lipschitz envelopes of noisy samples: min_i(b_i + L·‖x - x_i‖) and max_i(c_i - L·‖x - x_i‖)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from foliax.kernels_pallas.dispatch import dispatch

# Distances live in one tile of about this many elements: 512 kB, the second-level cache of a core.
_XLA_TILE = 1 << 17


class Envelope(NamedTuple):
  """Bounds on a Lipschitz function at the queries.

  Attributes:
    upper: min_i(b_i + L·‖x - x_i‖), +inf where no arm is open.
    argmin: the first arm that attains `upper`, -1 where no arm is open.
    lower: max_i(c_i - L·‖x - x_i‖), -inf where no arm is open.
  """

  upper: Float[Array, "m"]
  argmin: Int[Array, "m"]
  lower: Float[Array, "m"]


def envelope(
  queries: Float[Array, "m d"],
  arms: Float[Array, "n d"],
  upper_offsets: Float[Array, "n"],
  lipschitz: Float[Array, ""] | float,
  lower_offsets: Float[Array, "n"] | None = None,
  *,
  implementation: str | None = None,
  interpret: object = None,
) -> Envelope:
  """Upper and lower Lipschitz envelope of the arms at the queries, in one pass."""
  dtype = jnp.promote_types(jnp.result_type(queries, arms, upper_offsets), jnp.float32)
  queries, arms, upper_offsets = (x.astype(dtype) for x in (queries, arms, upper_offsets))
  lipschitz = jnp.asarray(lipschitz, dtype)
  if lower_offsets is not None:
    lower_offsets = lower_offsets.astype(dtype)
  form = functools.partial(dispatch, xla=_xla_form, tpu=_xla_form, gpu=_xla_form)
  upper, argmin, lower, _ = form(
    queries, arms, upper_offsets, lipschitz, lower_offsets, implementation="xla"
  )
  if lower is None:
    lower = jnp.full_like(upper, -jnp.inf)
  return Envelope(upper, jnp.where(upper < jnp.inf, argmin, -1), lower)


def _xla_form(queries, arms, upper_offsets, lipschitz, lower_offsets):
  (m, _), n = queries.shape, arms.shape[0]
  if m == 0 or n == 0:
    upper, index = jnp.full((m,), jnp.inf, queries.dtype), jnp.full((m,), -1, jnp.int32)
    return upper, index, *((None, None) if lower_offsets is None else (-upper, index))
  if m * n <= 2 * _XLA_TILE:
    return _xla_tile(queries, arms, upper_offsets, lipschitz, lower_offsets)
  rows = max(1, _XLA_TILE // n)
  padded = jnp.pad(queries, ((0, -m % rows), (0, 0))).reshape(-1, rows, queries.shape[1])
  out = jax.lax.map(
    lambda tile: _xla_tile(tile, arms, upper_offsets, lipschitz, lower_offsets), padded
  )
  return jax.tree.map(lambda x: x.reshape(-1)[:m], out)


def _xla_tile(queries, arms, upper_offsets, lipschitz, lower_offsets):
  queries, arms = jax.lax.optimization_barrier((queries.T, arms.T))
  squares = sum((q[:, None] - a[None, :]) ** 2 for q, a in zip(queries, arms, strict=True))
  distances = jax.lax.optimization_barrier(lipschitz * jnp.sqrt(squares))
  index = jnp.arange(distances.shape[1], dtype=jnp.int32)

  def first(values, best):
    return jnp.min(jnp.where(values == best[:, None], index, index.size), axis=1)

  above = upper_offsets + distances
  upper = above.min(axis=1)
  if lower_offsets is None:
    return upper, first(above, upper), None, None
  below = lower_offsets - distances
  lower = below.max(axis=1)
  return upper, first(above, upper), lower, first(below, lower)
