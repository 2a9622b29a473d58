"""Certificate-Guided Pruning (arXiv 2601.20231): do the certificates hold, and what do they cost?

Three functions of two variables with known optima under two noise levels, higher dimensions for the
trust regions, and the tuning of a support vector machine on real data; against random search,
uniform sampling of the active set, LIPO, GP-UCB, CMA-ES and TPE with the same calls and seeds, and
against BoTorch where an interpreter that has it is named by `config.peers_python`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from foliax.experiments import cgp_figures, peers, tuning
from foliax.experiments.claims import (
  Claim,
  claim,
  difference_interval,
  mean_interval,
  proportion_interval,
  ratio_interval,
  worst,
)
from foliax.experiments.context import Context
from foliax.kernels_pallas.dispatch import CompileCase
from foliax.search import benchmarks, cgp

TITLE = "Certificate-Guided Pruning"
PAPER = "2601.20231"
CAPTIONS = cgp_figures.CAPTIONS

PROBLEMS = ("needle", "branin", "wavy")
LIPSCHITZ = {"needle": 1.0, "branin": 6.0, "wavy": 3.3}
NOISE = (0.02, 0.1)
FAMILIES = ("cone", "ackley", "levy")

# name -> (strategy, factor on the Lipschitz constant, where the constant comes from); in an order
# in which the threads compile different programs
ARMS: dict[str, tuple[cgp.Strategy, float, int]] = {
  "hybrid": (cgp.HYBRID, 1.0, cgp.KNOWN),
  "cgp": (cgp.CGP, 1.0, cgp.KNOWN),
  "gp-ucb": (cgp.GP_UCB, 1.0, cgp.KNOWN),
  "random": (cgp.RANDOM, 1.0, cgp.KNOWN),
  "uniform-in-A_t": (cgp.UNIFORM_ACTIVE, 1.0, cgp.KNOWN),
  "lipo": (cgp.LIPO, 1.0, cgp.KNOWN),
  "adaptive-0.25": (cgp.CGP, 0.25, cgp.LEARNED),
  "adaptive-1": (cgp.CGP, 1.0, cgp.LEARNED),
  "adaptive-4": (cgp.CGP, 4.0, cgp.LEARNED),
}
PEERS = ("cma", "optuna-tpe")
TORCH_PEERS = ("botorch-turbo", "botorch-qnei")
BOTORCH_PROBLEMS = ("needle", "branin")
BOTORCH_ARMS = ("cgp", "hybrid", "gp-ucb", "random")
LAM = (0.0, 0.5, 1.0)
TUNING_ARMS = ("adaptive", "random", "lipo", "gp-ucb", *PEERS)


def get_config(scale: str) -> ml_collections.ConfigDict:
  """Sizes of the experiment.

  Command: `foliax run cgp:laptop`. Time: four minutes on two cores; a quarter of an hour more with
  BoTorch. Expect: certificates that hold in every run; a gap a third to two thirds of random
  search's; a regret below random search's where the function is not flat around its maximum; an
  active set that stays large at high noise.

  Fields:
    seeds: runs per arm and setting; sample i of every arm shares its seed.
    horizon: calls per run (T).
    coverage_runs: runs for the claims about probabilities, half at each noise level;
      coverage_horizon: their calls.
    target_gap: where the run that stops by itself stops.
    high_dims, high_horizon, high_seeds: the trust regions' problems.
    tuning_calls, tuning_seeds: calls and runs per arm on the real tasks.
    timing_repeats, timing_arms: rounds and observations of the ask + tell timing in six dimensions.
    peers_python: an interpreter with the `peers` extra, or empty; peers_horizon, peers_seeds: its
      calls and runs.
  """
  if scale == "pod":
    # The paper's thirty seeds a setting, all arms and settings at once.
    return ml_collections.ConfigDict(_laptop() | {"seeds": 30, "coverage_runs": 1000})
  sizes = _laptop()
  if scale == "smoke":
    sizes |= {
      "seeds": 2,
      "horizon": 24,
      "coverage_runs": 8,
      "coverage_horizon": 20,
      "target_gap": 0.6,
      "high_dims": (10,),
      "high_horizon": 24,
      "high_seeds": 2,
      "tuning_calls": 12,
      "tuning_seeds": 2,
      "timing_repeats": 3,
      "timing_arms": 40,
    }
  return ml_collections.ConfigDict(sizes)


def _laptop() -> dict[str, Any]:
  return {
    "seed": 0,
    "seeds": 10,
    "horizon": 300,
    "coverage_runs": 100,
    "coverage_horizon": 40,
    "target_gap": 0.1,
    "high_dims": (10, 30),
    "high_horizon": 300,
    "high_seeds": 4,
    "tuning_calls": 25,
    "tuning_seeds": 5,
    "timing_repeats": 5,
    "timing_arms": 500,
    "peers_python": "",
    "peers_horizon": 30,
    "peers_seeds": 5,
  }


# What is measured.


def run(config: ml_collections.ConfigDict, context: Context) -> dict[str, Any]:
  """Measures everything; each piece is done once in the life of the work directory."""
  work: dict[str, Callable[[], Any]] = {}

  def stage(name, function, *arguments):
    work[name] = lambda: context.stage(name, lambda: function(config, *arguments))

  settings = [(problem, sigma) for problem in PROBLEMS for sigma in NOISE]
  for problem, sigma in settings:
    for arm in arms_at(sigma):
      measure = _peer_arm if arm in PEERS else _arm
      stage(f"settings/{problem}-{sigma}/{arm}", measure, problem, sigma, arm)
  for problem in PROBLEMS:
    stage(f"coverage/{problem}", _coverage, problem)
  stage("stopping", _stopping)
  for lam in LAM:
    stage(f"lam/{lam}", _distance_weight, lam)
  high = [(family, d) for family in FAMILIES for d in config.high_dims]
  for family, d in high:
    stage(f"high/{family}-{d}", _high_dimensional, family, d)
  stage("picture", _picture)
  for name in tuning.NAMES:
    task = tuning.load(name)
    for arm in TUNING_ARMS:
      for seed in range(config.tuning_seeds):
        piece = functools.partial(_tune, config, context, task, arm, seed)
        work[f"tuning/{name}/{arm}/{seed}"] = piece
  if config.peers_python:
    for problem in BOTORCH_PROBLEMS:
      for seed in range(config.peers_seeds):
        for arm in TORCH_PEERS:
          stage(f"botorch/{problem}/{arm}/{seed}", _botorch, problem, arm, seed)
      for arm in BOTORCH_ARMS:
        stage(f"botorch/{problem}/{arm}", _few_calls, problem, arm)
  done = context.parallel("measuring", work)

  results = {
    "steps": checkpoints(config.horizon),
    "target gap": config.target_gap,
    "settings": {
      f"{problem} {sigma}": {
        arm: done[f"settings/{problem}-{sigma}/{arm}"] for arm in arms_at(sigma)
      }
      for problem, sigma in settings
    },
    "coverage": {problem: done[f"coverage/{problem}"] for problem in PROBLEMS},
    "stopping": done["stopping"],
    "distance weight": {str(lam): done[f"lam/{lam}"] for lam in LAM},
    "high": {f"{family}-{d}": done[f"high/{family}-{d}"] for family, d in high},
    "picture": done["picture"],
    "tuning": {
      name: {
        arm: [done[f"tuning/{name}/{arm}/{seed}"] for seed in range(config.tuning_seeds)]
        for arm in TUNING_ARMS
      }
      for name in tuning.NAMES
    },
    # Timed alone: nothing else runs meanwhile.
    "speed": context.stage("speed", functools.partial(_speed, config)),
  }
  _write_curves(context, results)
  if config.peers_python:
    results["botorch"] = {
      problem: {
        arm: [done[f"botorch/{problem}/{arm}/{seed}"] for seed in range(config.peers_seeds)]
        for arm in TORCH_PEERS
      }
      | {arm: done[f"botorch/{problem}/{arm}"] for arm in BOTORCH_ARMS}
      for problem in BOTORCH_PROBLEMS
    }
  return results


def arms_at(sigma: float) -> tuple[str, ...]:
  """The arms at a noise level: TPE, which takes as long as all others, only at the lower one."""
  return (*ARMS, *(name for name in PEERS if name != "optuna-tpe" or sigma == NOISE[0]))


def _write_curves(context, results) -> None:
  """Mean regret and gap for TensorBoard: one run an arm, one chart a setting."""
  for setting, arms in results["settings"].items():
    for arm, measured in arms.items():
      for quantity in ("regret", "gap"):
        means = np.mean(measured.get(quantity) or [[]], axis=0)
        for step, value in zip(results["steps"], means, strict=False):
          context.scalars(arm, {f"{quantity}/{setting}": value}, step)


def checkpoints(horizon: int) -> list[int]:
  """Calls after which curves are recorded: all early ones, then spaced by a ratio."""
  return sorted({min(horizon, round(horizon ** (i / 23))) for i in range(24)})


def _short(values: Any) -> Any:
  """Five significant digits are more than any of these numbers has."""
  return [float(f"{v:.5g}") for v in np.asarray(values, np.float64).ravel()]


def _rows(values: Any) -> list[list[float]]:
  return [_short(row) for row in np.asarray(values)]


def _keys(config, count, stream=0):
  key = jax.random.fold_in(jax.random.key(config.seed), stream)
  return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))


def _size(config):
  # Every arm starts from Sobol points: the centre of the box happens to be good on some problems.
  return cgp.Config(dim=2, capacity=config.horizon, initial=5)


_FUNCTIONS = [benchmarks.get(name).function for name in PROBLEMS]


def _objective(index, sigma):
  """One of the two-dimensional problems, chosen by a traced index: one compilation for all."""

  def objective(x, key):
    return jax.lax.switch(index, _FUNCTIONS, x) + sigma * jax.random.normal(key)

  return objective


@functools.partial(jax.jit, static_argnames=("strategy", "size", "horizon"))
def _runs(
  keys, index, optimisers, sigma, lipschitz, status, target, lam, *, strategy, size, horizon
):
  """Runs over keys, one after another, so that conditionals stay conditional."""

  def one(key):
    state, history = cgp.run(
      key,
      _objective(index, sigma),
      size,
      horizon,
      strategy=strategy,
      lipschitz=lipschitz,
      sigma=sigma,
      lip_status=status,
      target_gap=target,
      lam=lam,
      observe=lambda state: cgp.upper_env(optimisers, state)[0].min() - cgp.lower_bound(state),
    )
    return state, history

  return jax.lax.map(one, keys)


@jax.jit
def _finish(states, history, index):
  """The sharpest certificate at the end, and the value of what was recommended on the way."""
  final = jax.lax.map(lambda state: cgp.certificate(cgp.refine(state)), states)
  return final, jax.lax.switch(index, _FUNCTIONS, history.certificate.x_hat)


def _measure(config, problem, sigma, arm, count, horizon, *, stream=0, target=0.0, lam=0.0):
  strategy, factor, status = ARMS[arm]
  known = benchmarks.get(problem)
  optimisers = jnp.asarray(np.resize(known.optimiser, (3, 2)), jnp.float32)
  index = PROBLEMS.index(problem)
  states, history = _runs(
    _keys(config, count, stream),
    index,
    optimisers,
    sigma,
    factor * LIPSCHITZ[problem],
    status,
    target,
    lam,
    strategy=strategy,
    size=_size(config),
    horizon=horizon,
  )
  final, value = _finish(states, history, index)
  state = states._replace(key=jax.random.key_data(states.key))
  state, history, final, value = jax.tree.map(np.asarray, (state, history, final, value))
  return state, history, final, known.optimum - value


def _arm(config, problem, sigma, arm) -> dict[str, Any]:
  """One arm on one problem at one noise level."""
  state, history, final, regret = _measure(
    config, problem, sigma, arm, config.seeds, config.horizon
  )
  at = np.asarray(checkpoints(config.horizon)) - 1
  # Other strategies do not refine the cover as they go, or certify nothing.
  certifies = arm in ("cgp", "hybrid")
  return {
    "regret": _rows(regret[:, at]),
    "gap": _rows(history.certificate.gap[:, at]) if certifies else [],
    "final gap": _short(final.gap),
    "volume": _short(final.active_frac),
    "arms": state.k.tolist(),
    "lipschitz": _short(state.L),
    "doublings": state.doublings.tolist(),
    "flagged": (~history.certificate.valid.any(-1)).tolist(),
    "excluded": (history.observed < 0).any(-1).tolist(),
  }


def _peer_arm(config, problem, sigma, name) -> dict[str, Any]:
  """The same calls spent by another library."""
  at = np.asarray(checkpoints(config.horizon)) - 1
  regret = [
    _peer_regret(config, problem, sigma, seed, peers.in_process(name, 2, _peer_seed(config, seed)))
    for seed in range(config.seeds)
  ]
  return {"regret": _rows(np.asarray(regret)[:, at])}


def _peer_seed(config, seed):
  return config.seed * 1000 + seed


@functools.lru_cache(maxsize=8)
def _compiled(problem):
  return jax.jit(benchmarks.get(problem).function)


def _peer_regret(config, problem, sigma, seed, peer, horizon=None):
  """Regret after each call of another library's optimiser, at its best observation so far."""
  optimum, f = _optimum(problem), _compiled(problem)
  noise = np.random.default_rng([config.seed, seed]).normal(0.0, sigma, config.horizon)
  best, at_best, regret = -np.inf, -np.inf, []
  for call in range(horizon or config.horizon):
    x = peer.ask()
    value = float(f(np.asarray(x, np.float32)))
    y = value + float(noise[call])
    peer.tell(x, y)
    if y > best:
      best, at_best = y, value
    regret.append(optimum - at_best)
  return regret


def _optimum(problem) -> float:
  optimum = benchmarks.get(problem).optimum
  assert optimum is not None, f"the optimum of {problem} is not known"
  return optimum


def _coverage(config, problem) -> dict[str, Any]:
  """How often the optimum left the active set, or the bracket of the certificate, at any step."""
  inside, bracketed = [], []
  for sigma in NOISE:
    _, history, _, _ = _measure(
      config, problem, sigma, "cgp", config.coverage_runs // 2, config.coverage_horizon, stream=1
    )
    optimum = _optimum(problem)
    certificate = history.certificate
    # Optima are known to about single precision.
    inside += (history.observed >= -1e-6).all(-1).tolist()
    held = (certificate.lower <= optimum + 1e-6) & (certificate.upper >= optimum - 1e-6)
    bracketed += held.all(-1).tolist()
  return {"runs": len(inside), "contained": sum(inside), "bracketed": sum(bracketed)}


def _stopping(config) -> dict[str, Any]:
  """Runs that stop once the certified gap is small enough."""
  _, history, _, regret = _measure(
    config,
    "needle",
    NOISE[0],
    "cgp",
    config.coverage_runs,
    config.horizon,
    stream=2,
    target=config.target_gap,
  )
  return {"calls": history.spent.sum(-1).tolist(), "regret": _short(regret[:, -1])}


def _distance_weight(config, lam) -> list[float]:
  """Final gap on the needle for a weight of the distance term of the score."""
  _, _, final, _ = _measure(
    config, "needle", NOISE[0], "cgp", config.seeds, config.horizon, stream=3, lam=lam
  )
  return _short(final.gap)


@functools.partial(jax.jit, static_argnames=("strategy", "size", "horizon"))
def _high_runs(keys, index, lipschitz, *, strategy, size, horizon):
  """Final regrets on one family of problems, chosen by a traced index."""
  family = [benchmarks.get(f"{name}-{size.dim}").function for name in FAMILIES]
  value = lambda x: jax.lax.switch(index, family, x)

  def one(key):
    noisy = lambda x, key: value(x) + NOISE[0] * jax.random.normal(key)
    state, _ = cgp.run(
      key, noisy, size, horizon, strategy=strategy, lipschitz=lipschitz, sigma=NOISE[0]
    )
    return value(cgp.incumbent(state))

  return jax.lax.map(one, keys)


def _high_dimensional(config, family, dim) -> dict[str, Any]:
  """Trust regions against random search, with one set of seeds."""
  problem = benchmarks.get(f"{family}-{dim}")
  horizon = config.high_horizon
  size = cgp.Config(
    dim=dim, capacity=horizon, initial=2 * dim + 1, candidates=256, boxes=128, splits=64
  )
  keys, index = _keys(config, config.high_seeds, 4), FAMILIES.index(family)
  runs = functools.partial(_high_runs, keys, index, problem.lipschitz, size=size, horizon=horizon)
  return {
    "trust region": _short(problem.optimum - runs(strategy=cgp.TRUST_REGION)),
    "random": _short(problem.optimum - runs(strategy=cgp.RANDOM)),
  }


def _picture(config, cells: int = 64) -> dict[str, Any]:
  """The active set of one run after four numbers of calls, on a grid."""
  axis = (np.arange(cells) + 0.5) / cells
  grid = jnp.asarray(np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2), jnp.float32)
  times = [round(config.horizon * share) for share in (1 / 30, 1 / 10, 1 / 3, 1)]
  size = _size(config)
  observe = lambda state: (
    cgp.upper_env(grid, state)[0] >= cgp.lower_bound(state), state.x, state.k
  )  # fmt: skip
  _, history = cgp.run(
    jax.random.key(config.seed), _objective(2, NOISE[0]), size, config.horizon,
    lipschitz=LIPSCHITZ["wavy"], sigma=NOISE[0], observe=observe,
  )  # fmt: skip
  active, x, k = jax.tree.map(np.asarray, history.observed)
  value = np.asarray(benchmarks.get("wavy").function(grid))
  return {
    "cells": cells,
    "value": _short(value),
    "panels": [
      {
        "calls": t,
        "active": "".join("01"[int(a)] for a in active[t - 1]),
        "arms": _rows(x[t - 1, : k[t - 1]]),
        "gap": float(f"{history.certificate.gap[t - 1]:.4g}"),
      }
      for t in times
    ],
  }


# The real tasks: an ordinary Python function, asked and told.


def _tune(config, context, task, arm, seed) -> dict[str, Any]:
  """One run on a real task, and the true accuracy of what it recommends along the way."""
  name = f"tuning/{task.name}-{arm}-{seed}"
  calls = config.tuning_calls
  evaluate = lambda x, call: task.evaluate(x, _fold_seed(config, seed, call))
  if arm in PEERS:
    records = context.stage(f"{name}-calls", lambda: _tell_peer(config, arm, seed, calls, evaluate))
  else:
    records = _tell_strategy(config, context, f"{name}-calls", arm, seed, calls, evaluate)

  def truths():
    moments = sorted({max(1, round(calls * share)) for share in (0.15, 0.3, 0.5, 0.75, 1.0)})
    return {
      "calls": moments,
      "accuracy": _short([task.truth(records[t - 1]["x_hat"]) for t in moments]),
      "last": records[-1],
    }

  return context.stage(name, truths)


def _fold_seed(config, seed, call):
  """The folds of call t of run i: the same for every arm."""
  return config.seed * 1_000_003 + seed * 1009 + call


def _tell_peer(config, arm, seed, calls, evaluate):
  peer = peers.in_process(arm, 2, _peer_seed(config, seed))
  best, records = (-np.inf, None), []
  for call in range(calls):
    x = [float(v) for v in peer.ask()]
    y = evaluate(x, call)
    peer.tell(x, y)
    best = max(best, (y, x))
    records.append({"x": x, "y": y, "x_hat": best[1]})
  return records


def _tell_strategy(config, context, name, arm, seed, calls, evaluate):
  """The loop that anyone writes around `ask` and `tell`, resumable between calls."""
  strategy = {
    "adaptive": cgp.CGP,
    "random": cgp.RANDOM,
    "lipo": cgp.LIPO,
    "gp-ucb": cgp.GP_UCB,
  }[arm]
  size = cgp.Config(dim=2, capacity=calls, initial=5)
  key = jax.random.fold_in(jax.random.key(config.seed), 5_000 + seed)
  # Neither the constant nor the noise is known here: both are learned, nothing is certified.
  state = cgp.init(size, key, lipschitz=0.5, sigma=None, lip_status="learned")
  ask, learn = _jitted(strategy)

  def step(carry, call):
    state, memory = carry
    state, memory, x, repeat_idx = ask(state, memory, size)
    y = evaluate(np.asarray(x, np.float64), call)
    state = cgp.tell(state, x, repeat_idx, y)
    memory = learn(state, memory, size, x, repeat_idx, jnp.asarray(y, state.x.dtype))
    certificate = cgp.certificate(state)
    record = {
      "x": x, "y": y, "x_hat": cgp.incumbent(state), "gap": certificate.gap, "L": state.L,
      "valid": certificate.valid,
    }  # fmt: skip
    return (state, memory), record

  _, records = context.loop(name, (state, strategy.init(state, size)), step, calls)
  return records


@functools.lru_cache(maxsize=8)
def _jitted(strategy):
  static = functools.partial(jax.jit, static_argnums=2)
  return static(strategy.ask), static(strategy.learn)


# How long a proposal takes.


def own_ask_tell(dim: int, count: int, objective: Callable[[Any], float]) -> Callable[[], float]:
  """A call that times one ask + tell of ours on top of `count` observations.

  The observations are the uniform random points that the peers are told too.
  """
  size = cgp.Config(dim=dim, capacity=count + 64)
  state = cgp.init(size, jax.random.key(0), lipschitz=1.0, sigma=0.02)
  xs = np.random.default_rng(0).uniform(size=(count, dim)).astype(np.float32)
  ys = np.asarray([objective(x) for x in xs], np.float32)
  tell = lambda state, observation: (cgp.tell(state, observation[0], -1, observation[1]), None)
  state = jax.jit(lambda s: jax.lax.scan(tell, s, (jnp.asarray(xs), jnp.asarray(ys)))[0])(state)
  box = [jax.block_until_ready(state)]

  def once() -> float:
    begin = time.perf_counter()
    state, x, repeat_idx = jax.block_until_ready(cgp.ask(box[0], size))
    asked = time.perf_counter() - begin
    y = objective(np.asarray(x))
    begin = time.perf_counter()
    box[0] = jax.block_until_ready(cgp.tell(state, x, repeat_idx, y))
    return asked + time.perf_counter() - begin

  return once


def _speed(config) -> dict[str, Any]:
  """Seconds of one ask + tell in six dimensions, alternating between processes in one run."""
  f = _compiled("cone-6")
  objective = lambda x: float(f(np.asarray(x, np.float32)))
  python = config.peers_python or None
  names = ("optuna-tpe", *TORCH_PEERS) if python else ("optuna-tpe",)
  seconds = peers.ask_tell_seconds(
    {"cgp": own_ask_tell(6, config.timing_arms, objective)}, objective, python=python,
    names=names, count=config.timing_arms, repeats=config.timing_repeats,
  )  # fmt: skip
  return {name: _short(values) for name, values in seconds.items()}


def _botorch(config, problem, name, seed) -> float:
  """Final regret of BoTorch, which runs in a process of its own."""
  with peers.PeerProcess(config.peers_python, name, 2, _peer_seed(config, seed)) as peer:
    return _peer_regret(config, problem, NOISE[0], seed, peer, config.peers_horizon)[-1]


def _few_calls(config, problem, arm) -> list[float]:
  """Final regret of our arms with as few calls as BoTorch's."""
  out = _measure(config, problem, NOISE[0], arm, config.peers_seeds, config.peers_horizon)
  return _short(out[3][:, -1])


# What is claimed.


def claims(results: dict[str, Any]) -> list[Claim]:
  """The relations that the experiment could refute; N are limits that were expected."""
  settings = results["settings"]
  final = {name: {arm: _last(v) for arm, v in arms.items()} for name, arms in settings.items()}
  coverage = results["coverage"].values()
  stopping, target = results["stopping"], results["target gap"]
  share = lambda name: worst([proportion_interval(c[name], c["runs"]) for c in coverage], ">=")
  compared = lambda a, b: worst(
    [difference_interval(arms[a], arms[b]) for arms in final.values()], "<="
  )
  gaps = worst(
    [
      difference_interval(v["cgp"]["final gap"], v["random"]["final gap"])
      for v in settings.values()
    ],
    "<=",
  )
  within = sum(r <= target for r in stopping["regret"])
  flagged = [f for arms in settings.values() for f in arms["adaptive-0.25"]["flagged"]]
  excluded = [e for arms in settings.values() for e in arms["adaptive-0.25"]["excluded"]]
  noisy = [v for n, arms in settings.items() if n.endswith("0.1") for v in [arms["cgp"]["volume"]]]
  branin = [n for n in settings if n.startswith("branin")]
  hybrid = worst([difference_interval(final[n]["hybrid"], final[n]["cgp"]) for n in branin], "<=")
  speed, weight = results["speed"], results["distance weight"]
  rows = [
    ("R1", "The maximiser stays in the active set at every step in at least 95 % of runs, on each"
     " problem.", share("contained"), ">=", 0.95, ""),
    ("R2", "The optimum stays between the two certified bounds in at least 95 % of runs, on each"
     " problem.", share("bracketed"), ">=", 0.95, ""),
    ("R3", "Mean regret of CGP is below random search's in all six settings.",
     compared("cgp", "random"), "<", 0.0, "The setting that decides is the worst of six."),
    ("R4", "The certified gap of CGP is at most that of random search, from the same envelopes, in"
     " all six settings.", gaps, "<=", 0.0, ""),
    ("R5a", "Stopping at a certified gap leaves at most that regret in at least 95 % of runs.",
     proportion_interval(within, len(stopping["regret"])), ">=", 0.95,
     f"Target gap {target:g} on the needle, noise 0.02."),
    ("R5b", "Stopping there takes fewer calls than the budget.",
     mean_interval(stopping["calls"]), "<", float(results["steps"][-1]), ""),
    ("R6", "Regret of CGP-Hybrid is at most CGP's on Branin, at both noise levels.", hybrid, "<=",
     0.0, ""),
    ("R7", "CGP-Adaptive started from a quarter of the constant flags its certificates as not"
     " valid, in at least 95 % of runs.",
     proportion_interval(sum(flagged), len(flagged)), ">=", 0.95,
     f"It excluded the maximiser at some step in {sum(excluded)} of {len(excluded)} runs."),
    ("L1", "A distance term in the score (weight L) makes the final gap on the needle larger.",
     difference_interval(weight["1.0"], weight["0.0"]), ">", 0.0, ""),
    ("N1", "At noise 0.1 more than 90 % of the volume stays active: the gap is the usable signal.",
     worst([mean_interval(v) for v in noisy], ">"), ">", 0.9, "An expected limit."),
    *_high_claims(results["high"]),
    *_tuning_claims(results["tuning"]),
    ("S1", "One ask and tell after 500 observations in six dimensions is at least ten times as fast"
     " as BoTorch's.", _ratio(speed, "botorch-qnei"), ">=", 10.0, _missing(speed, "botorch-qnei")),
    ("S2", "It is no slower than Optuna's TPE.", _ratio(speed, "optuna-tpe"), ">=", 1.0,
     _missing(speed, "optuna-tpe")),
  ]  # fmt: skip
  return [claim(*row) for row in rows]


def _last(arm):
  return [regret[-1] for regret in arm["regret"]]


def _high_claims(high):
  low = [name for name in high if name.endswith("-10")]
  rows = [
    ("T1", "CGP-TR's regret is below random search's on all three problems in ten dimensions.",
     worst([difference_interval(high[n]["trust region"], high[n]["random"]) for n in low], "<")
     if low else None, "<", 0.0, ""),
  ]  # fmt: skip
  flat = [n for n in ("cone-30", "ackley-30") if n in high]
  rows.append(
    ("N2", "In thirty dimensions CGP-TR is no better than random search on cone and Ackley.",
     worst([difference_interval(high[n]["trust region"], high[n]["random"]) for n in flat], ">=")
     if flat else None, ">=", 0.0, "An expected limit.")
  )  # fmt: skip
  return rows


def _tuning_claims(tasks):
  accuracy = lambda arms, arm: [run["accuracy"][-1] for run in arms[arm]]
  gains = [
    difference_interval(accuracy(a, "adaptive"), accuracy(a, "random")) for a in tasks.values()
  ]
  valid = [run["last"]["valid"] for arms in tasks.values() for run in arms["adaptive"]]
  return [
    ("M1", "Tuning a support vector machine on real data, CGP-Adaptive ends at least as accurate as"
     " random search less half a point.", worst(gains, ">="), ">=", -0.005,
     f"Constant and noise are unknown: {sum(valid)} of {len(valid)} certificates call themselves"
     " valid."),
  ]  # fmt: skip


def _ratio(speed, peer):
  return ratio_interval(speed[peer], speed["cgp"]) if peer in speed else None


def _missing(speed, peer):
  return "" if peer in speed else "Needs the peers environment: --config.peers_python=PYTHON."


def figures(results: dict[str, Any]) -> dict[str, Any]:
  """Figures of the report, in order."""
  return cgp_figures.draw(results)


# What a pod would run.


def pod_runs(
  seeds: jax.Array, lipschitz: jax.Array, sigma: jax.Array, *, horizon: int
) -> tuple[jax.Array, jax.Array]:
  """Runs on Branin with their seeds and hyperparameters split over the axis `data` of the mesh.

  Returns:
    Recommended points `[runs, 2]` and the gap after each call `[runs, horizon]`.
  """
  size = cgp.Config(dim=2, capacity=horizon)

  def one(seed, lipschitz, sigma):
    state, history = cgp.run(
      jax.random.key(seed), _objective(1, sigma), size, horizon, lipschitz=lipschitz, sigma=sigma
    )
    return cgp.incumbent(state), history.certificate.gap

  rows = jax.sharding.PartitionSpec("data")
  return jax.shard_map(jax.vmap(one), in_specs=(rows, rows, rows), out_specs=(rows, rows))(
    seeds, lipschitz, sigma
  )


def preflight(config: ml_collections.ConfigDict) -> list[CompileCase]:
  """The runs of a sweep over seeds, constants and noise levels, 32 to a device."""
  cases = []
  for devices, targets in ((256, ("v5e-256", "v6e-256")), (8, ("h200x8",))):
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    runs = 32 * devices
    shapes = [
      jax.ShapeDtypeStruct((runs,), dtype, sharding=rows)
      for dtype in (jnp.uint32, jnp.float32, jnp.float32)
    ]
    function = functools.partial(pod_runs, horizon=config.horizon)
    cases.append(CompileCase(f"cgp/{runs}-runs", function, tuple(shapes), targets))
  return cases
