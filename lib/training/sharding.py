"""Where arrays live on many devices: one mesh, and rules from path patterns to PartitionSpecs."""

from typing import Any

import jax
from jaxtyping import Array


def constrain(x: Array, *axes: Any) -> Array:
  """Fixes how `x` is laid over the mesh that is set; does nothing when none is set.

  Args:
    x: an array inside a jitted function.
    *axes: for each dimension the name of a mesh axis, or None; names that the mesh lacks count as
      None.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  spec = jax.sharding.PartitionSpec(*(a if a in mesh.axis_names else None for a in axes))
  return jax.lax.with_sharding_constraint(x, spec)
