"""A branch-and-bound cover of the active set: boxes with sound upper bounds, updated call by call.

The live boxes (those with `bound >= l_t`) together contain every point with U_t(x) >= l_t, whatever
happened before. So their largest bound is at least max U_t, and their volume at least Vol(A_t).
Bounds only fall: a new or re-pulled arm costs one row (O(B d)), and splitting a box tightens it.
This replaces the paper's CMA-ES search for every number that is reported (our choice): a heuristic
search can miss the maximum, and would then certify too small a gap.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from foliax.kernels_pallas import envelope as envelope_kernel
from jaxtyping import Array, ArrayLike, Bool, Float


class Cover(NamedTuple):
  """Boxes [lo, hi] of the unit box; a free slot has `bound` and `value` of minus infinity."""

  lo: Float[Array, "b d"]
  hi: Float[Array, "b d"]
  bound: Float[Array, " b"]  # at least the maximum of U_t over the box
  value: Float[Array, " b"]  # U_t at `points` of the box


def root(boxes: int, dim: int, dtype: jnp.dtype) -> Cover:
  """The cover that knows nothing: the unit box, in the first of `boxes` slots."""
  first = jnp.arange(boxes) == 0
  unbounded = jnp.where(first, jnp.inf, -jnp.inf).astype(dtype)
  return Cover(jnp.zeros((boxes, dim), dtype), jnp.ones((boxes, dim), dtype), unbounded, unbounded)


def restart(cover: Cover, when: Bool[Array, ""]) -> Cover:
  """The root cover where `when`: needed whenever an upper bound may have risen."""
  boxes, dim = cover.lo.shape
  fresh = root(boxes, dim, cover.lo.dtype)
  return jax.tree.map(lambda a, b: jnp.where(when, a, b), fresh, cover)


def points(lo: Float[Array, "*b d"], hi: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
  """One proposal point per box: the centre, moved onto the faces of the domain that it touches.

  U_t often peaks on the boundary, where centres of boxes would only arrive in the limit.
  """
  centre = (lo + hi) / 2
  low, high = lo == 0, hi == 1
  return jnp.where(low & ~high, 0.0, jnp.where(high & ~low, 1.0, centre)).astype(lo.dtype)


def box_upper(
  lo: Float[Array, "b d"],
  hi: Float[Array, "b d"],
  x: Float[Array, "n d"],
  upper: Float[Array, " n"],
  lipschitz: ArrayLike,
) -> Float[Array, " b"]:
  """min_i {UCB_i + L max_{z in box} ||z - x_i||} >= max_box U_t, rounded outwards.

  The farthest corner is in closed form. Max-min is at most min-max, so a box whose bound is
  below l_t contains no maximiser; equality holds when the box is a point. Our choice.

  Args:
    lo, hi: opposite corners of B boxes.
    x, upper: N arms and their upper confidence bounds (infinite for unopened ones).
    lipschitz: L > 0.
  """
  # One coordinate at a time: a last axis of length d would keep the CPU from vectorising.
  farthest = (
    jnp.maximum(abs(a[:, None] - b), abs(c[:, None] - b))
    for a, b, c in zip(lo.T, x.T, hi.T, strict=True)
  )
  reach = lipschitz * jnp.sqrt(sum(f**2 for f in farthest))
  # The sum, root, product and addition round by less than (d + 4) / 2 units in the last place.
  rounding = (lo.shape[-1] + 4) / 2 * jnp.finfo(lo.dtype).eps
  size = jnp.where(jnp.isfinite(upper), abs(upper), 0.0)
  return (upper + reach + rounding * (size + reach)).min(-1)


def add_arm(
  cover: Cover, x: Float[Array, " d"], upper: Float[Array, ""], lipschitz: Float[Array, ""]
) -> Cover:
  """Lowers bounds and values by one arm that is new or whose upper bound fell; O(B d)."""
  bound = box_upper(cover.lo, cover.hi, x[None], upper[None], lipschitz)
  value = envelope_kernel.envelope(
    points(cover.lo, cover.hi), x[None], upper[None], lipschitz
  ).upper
  return cover._replace(
    bound=jnp.minimum(cover.bound, bound), value=jnp.minimum(cover.value, value)
  )


def live(cover: Cover, lower_bound: Float[Array, ""]) -> Bool[Array, " b"]:
  """Boxes that may contain a point of the active set."""
  return (cover.bound >= lower_bound) & (cover.bound > -jnp.inf)


def maximum(cover: Cover) -> Float[Array, ""]:
  """An upper bound of max U_t over the unit box.

  Boxes that died keep their bound until their slot is reused, and are below l_t <= max U_t.
  """
  return cover.bound.max()


def volume(cover: Cover, lower_bound: Float[Array, ""]) -> Float[Array, ""]:
  """An upper bound of the volume of the active set, in [0, 1]."""
  sizes = jnp.prod(cover.hi - cover.lo, axis=-1)
  return jnp.where(live(cover, lower_bound), sizes, 0.0).sum()


def split(
  cover: Cover,
  x: Float[Array, "n d"],
  upper: Float[Array, " n"],
  lipschitz: Float[Array, ""],
  lower_bound: Float[Array, ""],
  splits: int,
) -> Cover:
  """Halves the `splits` live boxes with the largest bounds along their longest side.

  One half stays in the parent's slot, the other takes a free or dead slot; without a free slot a
  box is left whole, which keeps the cover sound.
  """
  boxes = cover.bound.shape[0]
  alive = live(cover, lower_bound)
  _, parent = jax.lax.top_k(jnp.where(alive, cover.bound, -jnp.inf), splits)
  _, slot = jax.lax.top_k(-jnp.where(alive, jnp.inf, cover.bound), splits)
  lo, hi = cover.lo[parent], cover.hi[parent]
  longest = jax.nn.one_hot(jnp.argmax(hi - lo, -1), lo.shape[-1], dtype=bool)
  middle = (lo + hi) / 2
  # A box that floating point cannot halve any more is as small as it can get.
  divisible = ((lo < middle) & (middle < hi) | ~longest).all(-1)
  allowed = alive[parent] & ~alive[slot] & divisible
  new_lo = jnp.concatenate([lo, jnp.where(longest, middle, lo)])
  new_hi = jnp.concatenate([jnp.where(longest, middle, hi), hi])
  bound = box_upper(new_lo, new_hi, x, upper, lipschitz)
  bound = jnp.minimum(bound, jnp.tile(cover.bound[parent], 2))
  value = envelope_kernel.envelope(points(new_lo, new_hi), x, upper, lipschitz).upper
  where = jnp.concatenate([jnp.where(allowed, parent, boxes), jnp.where(allowed, slot, boxes)])
  # One scatter of positions and then gathers: scatters of rows are loops on a CPU.
  source = jnp.full(boxes, -1).at[where].set(jnp.arange(2 * splits), mode="drop")
  changed = source >= 0

  def put(old, new):
    return jnp.where(jnp.reshape(changed, (-1,) + (1,) * (old.ndim - 1)), new[source], old)

  return Cover(
    put(cover.lo, new_lo), put(cover.hi, new_hi), put(cover.bound, bound), put(cover.value, value)
  )


def refine(
  cover: Cover,
  x: Float[Array, "n d"],
  upper: Float[Array, " n"],
  lipschitz: Float[Array, ""],
  lower_bound: Float[Array, ""],
  *,
  splits: int,
  rounds: int,
  tolerance: float = 0.02,
) -> Cover:
  """Splits until `maximum` exceeds the best known value of U_t by `tolerance` of the gap.

  Args:
    cover, x, upper, lipschitz, lower_bound: as for `split`.
    splits: boxes split a round.
    rounds: most rounds.
    tolerance: stop when (max bound - max value) <= tolerance (max bound - l_t).
  """

  def coarse(carry):
    i, cover = carry
    top = cover.bound.max()
    excess = top - cover.value.max()
    room = jnp.any(~live(cover, lower_bound))
    # A fresh cover has infinite bounds: their difference is no number, and must be refined.
    return (i < rounds) & room & ~(excess <= tolerance * (top - lower_bound))

  return jax.lax.while_loop(
    coarse,
    lambda carry: (carry[0] + 1, split(carry[1], x, upper, lipschitz, lower_bound, splits)),
    (jnp.zeros((), jnp.int32), cover),
  )[1]
