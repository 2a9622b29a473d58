"""Losses of a tiny decoder for every shape of an eight-device mesh, as JSON on the last line.

The parent sets XLA_FLAGS so that this process has eight devices.
"""

import functools
import json

import jax
import numpy as np
from foliax.experiments import decoder
from foliax.language import model
from foliax.training import sharding

STEPS = 3
SHAPES = ((1, 1), (8, 1), (4, 2), (2, 4), (1, 8))


def run(data, model_axis):
  config = decoder.get_config("smoke")
  config.update({"rows": 8, "sequence": 16, "loss_chunk": 8, "warmup": 1, "remat": "full"})
  tokens = np.random.default_rng(0).integers(0, 256, (STEPS, 8, 17)).astype(np.int32)
  mesh = sharding.mesh(data, model_axis, jax.devices()[: data * model_axis])
  with jax.set_mesh(mesh):
    state = sharding.init_sharded(
      functools.partial(decoder.init, config=config),
      jax.random.key(0),
      rules=model.SHARDING_RULES,
    )
    layout = jax.tree.map(lambda x: x.sharding, state)
    update = jax.jit(decoder.make_update(config), donate_argnums=0)
    losses = []
    for rows in tokens:
      state, metrics = update(state, sharding.place_rows(rows))
      losses.append(float(metrics["loss"]))
  parts = lambda x: x.size // x.addressable_shards[0].data.size
  return {
    "losses": losses,
    "kept": jax.tree.all(
      jax.tree.map(lambda s, x: s.is_equivalent_to(x.sharding, x.ndim), layout, state)
    ),
    "compiled": update._cache_size(),
    "parts": [
      parts(state.params["layers"]["query"]),
      parts(state.params["embedding"]),
      parts(state.opt_state[1][0].mu["layers"]["down"]),
    ],
  }


if __name__ == "__main__":
  print(json.dumps({f"{data}x{axis}": run(data, axis) for data, axis in SHAPES}))
