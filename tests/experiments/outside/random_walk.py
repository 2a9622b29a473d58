"""A small experiment such as people write outside foliax: stages, a loop and every verdict."""

import time

import jax
import jax.numpy as jnp
import ml_collections
from foliax.experiments import claims as verdict
from foliax.experiments import figures as look

TITLE = "Random walks & their <drift>"
PAPER = "0000.00000"
CAPTIONS = {"paths": "Where each walk was after every step.", "ends": "Where each walk ended."}


def get_config(scale):
  if scale == "laptop":
    raise ValueError("a random walk needs no laptop")
  return ml_collections.ConfigDict(
    {
      "seeds": 4,
      "steps": {"smoke": 40, "pod": 4096}[scale],
      "drift": 0.5,
      "walk": {"pause_seconds": 0.0, "width": (1.0, 2.0), "reflect": False, "names": ["a", "b"]},
      "save_seconds": 2.0,
      "secret_failure": "",
    }
  )


def run(config, context):
  if config.secret_failure == "bad input":
    raise ValueError("drift must be\nsmaller than everything")
  if config.secret_failure == "bug":
    raise RuntimeError("a bug")
  context.save_seconds = config.save_seconds
  starts = context.stage("starts", lambda: _pause(config, jnp.arange(config.seeds) * 0.1))

  def step(carry, i):
    with (context.workdir / "steps.log").open("a") as log:
      log.write(f"{i}\n")
    _pause(config, None)
    key, x = carry
    key, noise = jax.random.split(key)
    x = x + config.drift + jax.random.normal(noise, x.shape) * config.walk.width[0]
    context.scalars("walk", {"mean": x.mean()}, i)
    return (key, x), x

  (_, last), path = context.loop("walk", (jax.random.key(0), jnp.array(starts)), step, config.steps)
  ends = context.stage("ends", lambda: _pause(config, {"last": last, "drift": last / config.steps}))
  return {"path": path, "ends": ends, "drift": config.drift}


def _pause(config, value):
  time.sleep(config.walk.pause_seconds)
  return value


def claims(results):
  drift = verdict.mean_interval(results["ends"]["drift"])
  claim = verdict.claim
  return [
    claim("W1", "Walks drift upwards.", drift, ">", 0.0),
    claim("W2", "Walks drift by more than 10 a step & never look <back>.", drift, ">=", 10.0),
    claim("W3", "The drift is at most what was set.", drift, "<=", drift.value),
    claim("W4", "A single walk says as much.", verdict.Interval(1.0, -float("inf"), 3.0), ">", 0),
    claim("W5", "Walkers enjoy it.", None, ">", 0.0, note="nobody asked them"),
  ]


def figures(results):
  from matplotlib.figure import Figure

  paths = Figure()
  axes = paths.subplots()
  for i, path in enumerate(zip(*results["path"], strict=True)):
    axes.plot(path, label=f"seed {i}")
  axes.axhline(0, color=look.PALETTE["grey"], lw=1)
  axes.set(xlabel="step $t$", ylabel="position", title="Every walk leaves its start")
  axes.legend(ncols=2)
  ends = Figure()
  left, right = ends.subplots(1, 2)
  left.bar(range(len(results["ends"]["last"])), results["ends"]["last"])
  left.set(xlabel="seed", ylabel="last position")
  right.imshow(results["path"], aspect="auto")
  right.grid(False)
  right.set(xlabel="seed", ylabel="step")
  return {"paths": paths, "ends": ends}


def preflight(config):
  from foliax.kernels_pallas.dispatch import CompileCase

  size = jax.ShapeDtypeStruct((config.steps, 128), jnp.float32)
  return [CompileCase("cumulative sum", lambda x: jnp.cumsum(x, 0), (size,), ("v5e-1",))]
