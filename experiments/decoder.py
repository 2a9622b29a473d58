"""Pretraining of a decoder on text: one job, on one device or on all devices of many processes.

Parameters and AdamW's moments are float32 and split over both axes of the mesh. The forward and
backward pass compute with a copy in `compute_dtype`; gradients are summed over devices in it and
become float32 before they are clipped.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax
from foliax.kernels_pallas.dispatch import CompileCase
from foliax.language import corpus, loss, model
from foliax.training import loop, sharding, step
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

TITLE = "Decoder pretraining on text"

MODELS = {
  "tiny": model.Config(
    vocab_size=256, hidden_size=64, layers=2, heads=8, kv_heads=8, head_dim=8, ffn_size=128
  ),
  # Llama 3.2 1B: its config.json, and Llama team 2024, arXiv 2407.21783
  "llama-1b": model.Config(
    vocab_size=128256,
    hidden_size=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    rope_theta=500000.0,
    rope_scaling=model.RopeScaling(32.0, 1.0, 4.0, 8192),
    context=131072,
  ),
  # Qwen3 8B: its config.json, and Qwen 2025, arXiv 2505.09388
  "qwen3-8b": model.Config(
    vocab_size=151936,
    hidden_size=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    rope_theta=1000000.0,
    rms_eps=1e-6,
    tied=False,
    qk_norm=True,
    context=40960,
  ),
}


class Pod(NamedTuple):
  """A training step to compile: mesh, and batch in rows of `sequence` tokens."""

  target: str
  data: int
  model: int
  rows: int
  sequence: int
  always: bool = False  # whether it is compiled without being asked for by name


# The meshes and batches that `preflight` compiles; start from them on such a machine.
PODS = {
  "llama-1b": (
    Pod("v5e-256", 256, 1, 512, 2048, always=True),
    Pod("v5p-512", 256, 1, 1024, 4096),
    Pod("v6e-256", 128, 2, 512, 4096),
    Pod("h200x8", 8, 1, 64, 4096),
  ),
  "qwen3-8b": (
    Pod("v5e-256", 64, 4, 512, 2048),
    Pod("v5p-512", 128, 2, 512, 4096),
    Pod("v6e-256", 64, 4, 256, 4096),
    Pod("h200x8", 4, 2, 16, 4096, always=True),
  ),
}


def get_config(scale: str) -> ml_collections.ConfigDict:
  """What is trained, on what, how long, and over which devices.

  Command: `foliax train decoder:laptop`; on a pod one of the files in `launch/`. Time: some five
  minutes on two cores at `laptop`. Expect there: a held-out loss of 1.1 nats a byte, from 5.5. (The
  sections of Python's manual repeat each other; other text is harder.)

  Fields:
    model: a name in `MODELS`.
    text: a file, or a folder of `.txt` (bytes) and `.npy` (token ids) files; Python's manual when
      empty. held_out: fraction at its end that is only evaluated on.
    sequence: tokens in a row; rows: rows in a batch, over all devices.
    steps: optimiser steps; steps_per_call: how many of them in one call of the devices.
    mesh.data, mesh.model: devices on each axis; data 0 takes all that model leaves.
    learning_rate: at its peak, after warmup steps, falling to a tenth of it; weight_decay: on
      matrices.
    compute_dtype: of the forward and backward pass; remat: see `foliax.language.model.Config`;
      loss_chunk: tokens of a row whose logits are held at once.
    evaluate_every: steps between evaluations, on evaluate_batches batches of held-out rows.
    checkpoint_seconds: time between checkpoints.
  """
  config = {
    "seed": 0,
    "model": "tiny",
    "text": "",
    "held_out": 0.05,
    "sequence": 256,
    "rows": 16,
    "steps": 1500,
    "steps_per_call": 10,
    "mesh": {"data": 0, "model": 1},
    "learning_rate": 3e-3,
    "warmup": 50,
    "weight_decay": 0.1,
    "compute_dtype": "float32",
    "remat": "none",
    "loss_chunk": 256,
    "evaluate_every": 250,
    "evaluate_batches": 4,
    "checkpoint_seconds": 30.0,
  }
  if scale == "smoke":
    config |= {"sequence": 64, "rows": 8, "steps": 20, "steps_per_call": 5, "warmup": 5}
    config |= {"evaluate_every": 10, "evaluate_batches": 2}
  elif scale == "pod":
    config |= {"model": "llama-1b", "sequence": 2048, "rows": 512, "steps": 100_000}
    config |= {"learning_rate": 3e-4, "warmup": 2000, "loss_chunk": 512, "held_out": 0.001}
    config |= {"compute_dtype": "bfloat16", "remat": "full", "evaluate_every": 1000}
    config |= {"checkpoint_seconds": 600.0}
  elif scale != "laptop":
    raise ValueError(f"scale is {scale!r}; allowed: smoke, laptop, pod")
  return ml_collections.ConfigDict(config)


def train(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  log: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
  """Trains to the end, from where an earlier run in `workdir` left off.

  Every process calls it with the same arguments.

  Args:
    config: see `get_config`.
    workdir: folder that all processes share; checkpoints and TensorBoard curves go there.
    log: called in process 0 with the number of a step and its metrics.
  Returns:
    Numbers to report, the same in every process.
  Raises:
    ValueError: a field of the configuration that does not fit.
    foliax.training.loop.Preempted: SIGTERM came, and the state is saved.
  """
  mesh = sharding.mesh(config.mesh.data or None, config.mesh.model)
  text = corpus.Corpus(config.text or None)
  split = 1 - config.held_out
  windows, held_out = (
    corpus.Windows(text, config.sequence, _described(config).vocab_size, part)
    for part in ((0, split), (split, 1))
  )
  share = sharding.row_share(mesh)
  batches = corpus.Batches(windows, config.rows, seed=config.seed, share=share)
  started = time.monotonic()
  with jax.set_mesh(mesh):
    state = sharding.init_sharded(
      functools.partial(init, config=config),
      jax.random.key(config.seed),
      rules=model.SHARDING_RULES,
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    fitted = loop.fit(
      make_update(config),
      state,
      batches,
      config.steps,
      folder=workdir / "checkpoints",
      steps_per_call=config.steps_per_call,
      checkpoint_seconds=config.checkpoint_seconds,
      evaluate=_evaluation(config, held_out, share),
      evaluate_every=config.evaluate_every,
      log=log,
      tensorboard=workdir / "tensorboard",
      batch_sharding=NamedSharding(mesh, PartitionSpec("data")),
      donate=True,
      description=f"decoder {config.model}",
    )
    evaluated = _evaluation(config, held_out, share)(fitted.state)
  return {
    "parameters": count,
    "steps": fitted.step,
    "skipped": fitted.skipped,
    "tokens": fitted.step * config.rows * config.sequence,
    "held_out_loss": evaluated["loss"],
    "best_held_out_loss": fitted.best,
    "best_step": fitted.best_step,
    "seconds": time.monotonic() - started,
    "processes": jax.process_count(),
    "mesh": dict(mesh.shape),
  }


def init(key: Key[Array, ""], config: ml_collections.ConfigDict) -> step.TrainState:
  """The state before the first step."""
  params_key, step_key = jax.random.split(key)
  return step.init(model.init(params_key, _described(config)), _optimizer(config), step_key)


def make_update(config: ml_collections.ConfigDict) -> Callable[..., Any]:
  """The training step: `update(state, rows of tokens) -> (state, metrics)`, pure."""
  update = step.gradient_step(
    lambda params, batch, key: (_mean_loss(params, batch, config), {}), _optimizer(config)
  )

  def constrained(state: step.TrainState, batch: Int[Array, "b t"]):
    state, metrics = update(state, batch)
    return sharding.constrain_tree(state, model.SHARDING_RULES), metrics

  return constrained


def preflight(config: ml_collections.ConfigDict) -> list[CompileCase]:
  """The training step of real models on the pods of `PODS`."""
  cases = []
  for name, pods in PODS.items():
    for pod in pods:
      config = config.copy_and_resolve_references()
      config.update({"model": name, "rows": pod.rows, "sequence": pod.sequence})
      mesh = sharding.abstract_mesh(pod.data, pod.model)
      state = jax.eval_shape(functools.partial(init, config=config), jax.random.key(0))
      laid = sharding.shardings(state, model.SHARDING_RULES, mesh)
      state = jax.tree.map(lambda leaf, s: leaf.update(sharding=s), state, laid)
      batch = jax.ShapeDtypeStruct(
        (pod.rows, pod.sequence + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec("data")),
      )
      label = f"{name} {pod.data}x{pod.model}, {pod.rows} rows of {pod.sequence} tokens"
      update = jax.jit(make_update(config), donate_argnums=0)
      case = CompileCase(label, update, (state, batch), (pod.target,))
      cases.append(case._replace(takes_minutes=not pod.always))
  return cases


def _described(config: ml_collections.ConfigDict) -> model.Config:
  if config.model not in MODELS:
    raise ValueError(f"model is {config.model!r}; allowed: {', '.join(MODELS)}")
  return dataclasses.replace(MODELS[config.model], remat=config.remat)


def _optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup, config.steps, 0.1 * config.learning_rate
  )

  def matrices(params):
    decayed = lambda path, _: not path[-1].key.endswith(("norm", "bias"))
    return jax.tree.map_with_path(decayed, params)

  adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=matrices)
  return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _mean_loss(
  params: model.Params, batch: Int[Array, "b t"], config: ml_collections.ConfigDict
) -> Float[Array, ""]:
  # The copy keeps the layout, so that what devices gather from each other is the smaller type.
  cast = jax.tree.map(lambda x: x.astype(config.compute_dtype), params)
  cast = sharding.constrain_tree(cast, model.SHARDING_RULES)
  total, count = loss.next_token_loss(
    cast, _described(config), batch[:, :-1], batch[:, 1:], chunk=config.loss_chunk
  )
  return total / count


def _evaluation(
  config: ml_collections.ConfigDict, held_out: corpus.Windows, share: tuple[int, int]
) -> Callable[[step.TrainState], dict[str, float]]:
  mean_loss = jax.jit(lambda params, rows: _mean_loss(params, rows, config))

  def evaluate(state: step.TrainState) -> dict[str, float]:
    batches = corpus.Batches(held_out, config.rows, share=share)  # the same ones every time
    losses = [
      mean_loss(state.params, sharding.place_rows(next(batches)))
      for _ in range(config.evaluate_batches)
    ]
    return {"loss": sum(map(float, losses)) / len(losses)}

  return evaluate
