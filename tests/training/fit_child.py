"""A training run to be killed: `python fit_child.py FOLDER STEPS [PAUSE_SECONDS]`.

Dropout draws from the key of the state, rows come from grain, evaluations decide what is best, and
steps 30 to 32 have batches that are not finite: everything a resumed run has to get right.
"""

import hashlib
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from foliax.training import data, loop, step

SIZE = 60_000  # large enough for a checkpoint to take a while


def loss(params, batch, key):
  kept = jax.random.bernoulli(key, 0.9, params["w"].shape)
  error = jnp.vdot(params["w"] * kept, jnp.ones(SIZE)) / SIZE - batch["x"]
  return jnp.mean(error**2), {}


def digest(tree):
  raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return hashlib.sha256(
    b"".join(np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree))
  ).hexdigest()


def run(folder, steps, pause=0.0):
  rows = np.random.default_rng(0).standard_normal(64).astype(np.float32)
  optimizer = optax.adam(1e-2)
  update = step.gradient_step(loss, optimizer)

  def spoiled(state, batch):
    bad = (state.step >= 29) & (state.step < 32)
    return update(state, {"x": jnp.where(bad, jnp.nan, batch["x"])})

  def log(step, metrics):
    print(step, flush=True)
    time.sleep(pause)

  fitted = loop.fit(
    spoiled,
    step.init({"w": jnp.zeros(SIZE)}, optimizer, jax.random.key(0)),
    data.batches({"x": rows}, 8),
    steps,
    folder=folder,
    steps_per_call=2,
    checkpoint_seconds=0.05,
    evaluate=lambda state: {"loss": jnp.abs(state.params["w"]).sum()},
    evaluate_every=8,
    maximise=True,
    log=log,
  )
  return [digest(fitted.state), fitted.step, fitted.skipped, fitted.best, fitted.best_step]


if __name__ == "__main__":
  result = run(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
  print("end", *result, flush=True)
