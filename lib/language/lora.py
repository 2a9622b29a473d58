"""Low-rank adaptation: train two thin matrices beside each frozen weight (Hu et al. 2021).

W x + (alpha / r) B A x, with A drawn at random and B zero, so that training starts from the model
as it is. Source: arXiv 2106.09685, section 4.1.

Everything is a function of the params pytree of `foliax.language.model`:

  adapters = init(key, params, rank=8)
  logits, _ = forward(apply(params, adapters), config, tokens)     # differentiate this
  merged = merge(params, adapters)                                 # plain parameters again
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

Params = dict[str, Any]
Adapters = dict[str, dict[str, Array]]

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


class LowRank(NamedTuple):
  """A weight with its adapter; `model.forward` and the rest take it in place of a matrix."""

  base: Float[Array, "*layers i o"]
  down: Float[Array, "*layers i r"]
  up: Float[Array, "*layers r o"]

  def project(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
    """`x @ (base + down @ up)` without forming the sum."""
    return x @ self.base + ((x @ self.down) @ self.up).astype(x.dtype)


def init(
  key: Key[Array, ""], params: Params, rank: int = 8, targets: Sequence[str] = MATRICES
) -> Adapters:
  """Adapters that change nothing yet.

  Args:
    key: a typed random key.
    params: the model's parameters.
    rank: r, the width of the adapters.
    targets: which weight matrices get one, of `MATRICES`.
  Returns:
    target -> `{"down": [L, i, r], "up": [L, r, o]}` in float32.
  Raises:
    ValueError: a rank under 1, or a target that is no weight matrix.
  """
  if rank < 1:
    raise ValueError(f"rank is {rank}; it must be at least 1")
  if unknown := [name for name in targets if name not in MATRICES]:
    raise ValueError(f"targets has {unknown}; allowed: {', '.join(MATRICES)}")
  adapters = {}
  for name in targets:
    layers, fan_in, fan_out = params["layers"][name].shape
    draw = jax.random.normal(
      jax.random.fold_in(key, MATRICES.index(name)), (layers, fan_in, rank), jnp.float32
    )
    adapters[name] = {
      "down": draw / math.sqrt(fan_in),
      "up": jnp.zeros((layers, rank, fan_out), jnp.float32),
    }
  return adapters


def apply(params: Params, adapters: Adapters, alpha: float | int = 16.0) -> Params:
  """The parameters with adapters beside their weights.

  Args:
    params: the model's parameters.
    adapters: from `init`, after training.
    alpha: strength; the adapter's product is scaled by `alpha / rank`.
  """
  layers = dict(params["layers"])
  for name, adapter in adapters.items():
    base = layers[name]
    scale = alpha / adapter["down"].shape[-1]
    layers[name] = LowRank(
      base, adapter["down"].astype(base.dtype), (scale * adapter["up"]).astype(base.dtype)
    )
  return params | {"layers": layers}


def merge(params: Params, adapters: Adapters, alpha: float | int = 16.0) -> Params:
  """Plain parameters of the same function as `apply`, up to rounding; arguments as there."""
  layers = dict(params["layers"])
  for name, adapter in adapters.items():
    scale = alpha / adapter["down"].shape[-1]
    change = jnp.einsum("lir,lro->lio", adapter["down"], scale * adapter["up"])
    layers[name] = (layers[name].astype(jnp.float32) + change).astype(layers[name].dtype)
  return params | {"layers": layers}
