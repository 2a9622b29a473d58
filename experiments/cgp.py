"""Certificate-Guided Pruning (arXiv 2601.20231): do the certificates hold, and what do they cost?

Three functions of two variables with known optima under two noise levels, higher dimensions for the
trust regions, and the tuning of a support vector machine on real data; against random search,
uniform sampling of the active set, LIPO, GP-UCB, CMA-ES and TPE with the same calls and seeds, and
against BoTorch where an interpreter that has it is named by `config.peers_python`.
"""

import concurrent.futures
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

# name -> (strategy, factor on the Lipschitz constant, where the constant comes from)
ARMS: dict[str, tuple[cgp.Strategy, float, int]] = {
  "cgp": (cgp.CGP, 1.0, cgp.KNOWN),
  "adaptive L/4": (cgp.CGP, 0.25, cgp.LEARNED),
  "adaptive L": (cgp.CGP, 1.0, cgp.LEARNED),
  "adaptive 4L": (cgp.CGP, 4.0, cgp.LEARNED),
  "hybrid": (cgp.HYBRID, 1.0, cgp.KNOWN),
  "random": (cgp.RANDOM, 1.0, cgp.KNOWN),
  "uniform in A_t": (cgp.UNIFORM_ACTIVE, 1.0, cgp.KNOWN),
  "lipo": (cgp.LIPO, 1.0, cgp.KNOWN),
  "gp-ucb": (cgp.GP_UCB, 1.0, cgp.KNOWN),
}
PEERS = ("cma", "optuna-tpe")
TORCH_PEERS = ("botorch-turbo", "botorch-qnei")
TUNING_ARMS = ("adaptive", "hybrid", "random", "lipo", "gp-ucb", *PEERS)


def get_config(scale: str) -> ml_collections.ConfigDict:
  """Sizes of the experiment.

  Command: `foliax run cgp:laptop`. Time: about four minutes on two cores. Expect: the certificates
  contain the optimum in every run, the regret is below that of random search, the gap shrinks
  roughly as the inverse root of the calls, and the active set stays large at high noise.

  Fields:
    seeds: runs per arm and setting; sample i of every arm shares its seed.
    horizon: calls per run (T).
    coverage_runs: runs for the claims about probabilities; coverage_horizon: their calls.
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
    "coverage_horizon": 60,
    "target_gap": 0.1,
    "high_dims": (10, 30),
    "high_horizon": 400,
    "high_seeds": 4,
    "tuning_calls": 40,
    "tuning_seeds": 5,
    "timing_repeats": 7,
    "timing_arms": 500,
    "peers_python": "",
    "peers_horizon": 60,
    "peers_seeds": 5,
  }


# What is measured.


def run(config: ml_collections.ConfigDict, context: Context) -> dict[str, Any]:
  """Measures everything; each stage is done once in the life of the work directory."""
  settings = [(problem, sigma) for problem in PROBLEMS for sigma in NOISE]
  steps = checkpoints(config.horizon)
  results: dict[str, Any] = {"steps": steps, "target gap": config.target_gap, "settings": {}}
  with context.progress("synthetic", len(settings) * (len(ARMS) + len(PEERS))) as bar:
    for problem, sigma in settings:
      name = f"{problem} {sigma}"
      measure = functools.partial(_setting, config, problem, sigma, steps, bar.advance)
      results["settings"][name] = context.stage(f"settings/{problem}-{sigma}", measure)
  with context.progress("certificates", 2 + len(PROBLEMS)) as bar:
    results["coverage"] = {}
    for problem in PROBLEMS:
      stage = functools.partial(_coverage, config, problem)
      results["coverage"][problem] = context.stage(f"coverage/{problem}", stage)
      bar.advance()
    results["stopping"] = context.stage("stopping", functools.partial(_stopping, config))
    bar.advance()
    results["distance weight"] = context.stage("lam", functools.partial(_distance_weight, config))
    bar.advance()
  names = [(family, d) for family in ("cone", "ackley", "levy") for d in config.high_dims]
  results["high"] = {}
  with context.progress("high dimensions", len(names)) as bar:
    for family, d in names:
      stage = functools.partial(_high_dimensional, config, f"{family}-{d}")
      results["high"][f"{family}-{d}"] = context.stage(f"high/{family}-{d}", stage)
      bar.advance()
  results["picture"] = context.stage("picture", functools.partial(_picture, config))
  results["tuning"] = _tuning(config, context)
  results["speed"] = context.stage("speed", functools.partial(_speed, config))
  if config.peers_python:
    results["botorch"] = _botorch(config, context)
  return results


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
    final = cgp.certificate(cgp.refine(state))
    value = jax.lax.switch(index, _FUNCTIONS, history.certificate.x_hat)
    return state.L, state.k, state.doublings, history, final, value

  return jax.lax.map(one, keys)


def _measure(config, problem, sigma, arm, count, horizon, *, stream=0, target=0.0, lam=0.0):
  strategy, factor, status = ARMS[arm]
  known = benchmarks.get(problem)
  optimisers = jnp.asarray(np.resize(known.optimiser, (3, 2)), jnp.float32)
  out = _runs(
    _keys(config, count, stream),
    PROBLEMS.index(problem),
    optimisers,
    sigma,
    factor * LIPSCHITZ[problem],
    status,
    target,
    lam,
    strategy=strategy,
    size=cgp.Config(dim=2, capacity=config.horizon),
    horizon=horizon,
  )
  *scalars, history, final, value = jax.tree.map(np.asarray, out)
  return scalars, history, final, known.optimum - value


def _setting(config, problem, sigma, steps, advance) -> dict[str, Any]:
  """Every arm on one problem at one noise level."""
  at = np.asarray(steps) - 1

  def measure(arm):
    scalars, history, final, regret = _measure(
      config, problem, sigma, arm, config.seeds, config.horizon
    )
    lipschitz, opened, doublings = scalars
    # Strategies that do not refine the cover as they go have a gap only at the end.
    refines = arm.startswith(("cgp", "adaptive", "hybrid"))
    gap = _rows(history.certificate.gap[:, at]) if refines else []
    advance()
    return arm, {
      "regret": _rows(regret[:, at]),
      "gap": gap,
      "final gap": _short(final.gap),
      "volume": _short(final.active_frac),
      "arms": opened.tolist(),
      "lipschitz": _short(lipschitz),
      "doublings": doublings.tolist(),
      "flagged": (~history.certificate.valid.all(-1)).tolist(),
      "excluded": (history.observed < 0).any(-1).tolist(),
    }

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    measured = dict(pool.map(measure, ARMS))
  for name in PEERS:
    regret = [_peer_regret(config, problem, sigma, name, i) for i in range(config.seeds)]
    measured[name] = {"regret": _rows(np.asarray(regret)[:, at])}
    advance()
  return measured


@functools.lru_cache(maxsize=8)
def _compiled(problem):
  return jax.jit(benchmarks.get(problem).function)


def _peer_regret(config, problem, sigma, name, seed, horizon=None, peer=None):
  """Regret after each call of another library's optimiser, at its best observation so far."""
  known, f = benchmarks.get(problem), _compiled(problem)
  horizon = horizon or config.horizon
  noise = np.random.default_rng([config.seed, seed]).normal(0.0, sigma, horizon)
  peer = peer or peers.in_process(name, known.dim, config.seed * 1000 + seed)
  best, at_best, regret = -np.inf, -np.inf, []
  for call in range(horizon):
    x = peer.ask()
    value = float(f(np.asarray(x, np.float32)))
    y = value + float(noise[call])
    peer.tell(x, y)
    if y > best:
      best, at_best = y, value
    regret.append(known.optimum - at_best)
  return regret


def _optimum(problem) -> float:
  optimum = benchmarks.get(problem).optimum
  assert optimum is not None, f"the optimum of {problem} is not known"
  return optimum


def _coverage(config, problem) -> dict[str, Any]:
  """How often the optimum left the active set, or the bracket of the certificate."""
  inside, bracketed = [], []
  for sigma in NOISE:
    _, history, _, _ = _measure(
      config, problem, sigma, "cgp", config.coverage_runs, config.coverage_horizon, stream=1
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


def _distance_weight(config) -> dict[str, Any]:
  """Final gap on the needle for several weights of the distance term of the score."""
  gaps = {}
  for lam in (0.0, 0.5, 1.0):
    _, _, final, _ = _measure(
      config, "needle", NOISE[0], "cgp", config.seeds, config.horizon, stream=3, lam=lam
    )
    gaps[str(lam)] = _short(final.gap)
  return gaps


def _high_dimensional(config, name) -> dict[str, Any]:
  """Trust regions against random search, with one set of seeds."""
  problem = benchmarks.get(name)
  size = cgp.Config(
    dim=problem.dim, capacity=config.high_horizon, candidates=256, boxes=128, splits=64
  )
  sigma = NOISE[0]

  def measure(strategy):
    @jax.jit
    def runs(keys):
      def one(key):
        noisy = lambda x, key: problem.function(x) + sigma * jax.random.normal(key)
        state, _ = cgp.run(
          key, noisy, size, config.high_horizon, strategy=strategy,
          lipschitz=problem.lipschitz, sigma=sigma,
        )  # fmt: skip
        return problem.optimum - problem.function(cgp.incumbent(state))

      return jax.lax.map(one, keys)

    return _short(runs(_keys(config, config.high_seeds, 4)))

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    trust, random = pool.map(measure, (cgp.TRUST_REGION, cgp.RANDOM))
  return {"trust region": trust, "random": random}


def _picture(config, cells: int = 64) -> dict[str, Any]:
  """The active set of one run after four numbers of calls, on a grid."""
  axis = (np.arange(cells) + 0.5) / cells
  grid = jnp.asarray(np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2), jnp.float32)
  times = [round(config.horizon * share) for share in (1 / 30, 1 / 10, 1 / 3, 1)]
  size = cgp.Config(dim=2, capacity=config.horizon)
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


def _tuning(config, context) -> dict[str, Any]:
  results: dict[str, Any] = {}
  total = len(tuning.NAMES) * len(TUNING_ARMS) * config.tuning_seeds
  with context.progress("tuning", total) as bar:
    for name in tuning.NAMES:
      task = tuning.load(name)
      arms: dict[str, list[Any]] = {}
      for arm in TUNING_ARMS:
        arms[arm] = []
        for seed in range(config.tuning_seeds):
          record = _tune(config, context, task, arm, seed)
          arms[arm].append(record)
          bar.advance()
      results[name] = arms
  return results


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
    moments = [t for t in checkpoints(calls) if t >= 4]
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
  peer = peers.in_process(arm, 2, config.seed * 1000 + seed)
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
    "hybrid": cgp.HYBRID,
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


def _botorch(config, context) -> dict[str, Any]:
  """BoTorch on the two smallest settings, and every other arm with the same few calls."""
  results: dict[str, Any] = {}
  with context.progress("BoTorch", 2 * len(TORCH_PEERS) * config.peers_seeds) as bar:
    for problem in ("needle", "branin"):
      arms: dict[str, Any] = {}
      for name in TORCH_PEERS:

        def final(seed, problem=problem, name=name):
          with peers.PeerProcess(config.peers_python, name, 2, seed) as peer:
            return _peer_regret(
              config, problem, NOISE[0], name, seed, config.peers_horizon, peer
            )[-1]  # fmt: skip

        arms[name] = []
        for seed in range(config.peers_seeds):
          stage = f"botorch/{problem}-{name}-{seed}"
          arms[name].append(context.stage(stage, functools.partial(final, seed)))
          bar.advance()
      for arm in ("cgp", "hybrid", "gp-ucb", "random"):
        measure = functools.partial(
          _measure, config, problem, NOISE[0], arm, config.peers_seeds, config.peers_horizon
        )
        arms[arm] = context.stage(
          f"botorch/{problem}-{arm}", lambda m=measure: _short(m()[3][:, -1])
        )
      results[problem] = arms
  return results


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
  flagged = [f for arms in settings.values() for f in arms["adaptive L/4"]["flagged"]]
  excluded = [e for arms in settings.values() for e in arms["adaptive L/4"]["excluded"]]
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
     " valid.", proportion_interval(sum(flagged), len(flagged)), ">=", 0.95,
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
  hybrid = [
    difference_interval(accuracy(a, "hybrid"), accuracy(a, "random")) for a in tasks.values()
  ]
  valid = [run["last"]["valid"] for arms in tasks.values() for run in arms["adaptive"]]
  return [
    ("M1", "Tuning a support vector machine on real data, CGP-Adaptive ends at least as accurate as"
     " random search less half a point.", worst(gains, ">="), ">=", -0.005,
     f"Constant and noise are unknown: {sum(valid)} of {len(valid)} certificates call themselves"
     " valid."),
    ("M2", "So does CGP-Hybrid.", worst(hybrid, ">="), ">=", -0.005, ""),
  ]  # fmt: skip


def _ratio(speed, peer):
  return ratio_interval(speed[peer], speed["cgp"]) if peer in speed else None


def _missing(speed, peer):
  return "" if peer in speed else "Needs the peers environment: --config.peers_python=PYTHON."


def figures(results: dict[str, Any]) -> dict[str, Any]:
  """Figures of the report, in order."""
  return cgp_figures.draw(results)


# What a pod would run.


def preflight(config: ml_collections.ConfigDict) -> list[CompileCase]:
  """The synthetic runs with their seeds sharded over a slice."""
  size = cgp.Config(dim=2, capacity=config.horizon)

  def runs(seeds, lipschitz, sigma):
    def one(seed, lipschitz, sigma):
      key = jax.random.key(seed)
      state, history = cgp.run(
        key, _objective(1, sigma), size, config.horizon, lipschitz=lipschitz, sigma=sigma
      )
      return cgp.incumbent(state), history.certificate.gap

    return jax.vmap(one)(seeds, lipschitz, sigma)

  cases = []
  for count, targets in ((256, ("v5e-256", "v6e-256")), (8, ("h200x8",))):
    mesh = jax.sharding.AbstractMesh((count,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shape = lambda dtype, n=32 * count, split=split: jax.ShapeDtypeStruct(
      (n,), dtype, sharding=split
    )
    arguments = (shape(jnp.uint32), shape(jnp.float32), shape(jnp.float32))
    cases.append(CompileCase(f"cgp/{32 * count}-runs", runs, arguments, targets))
  return cases
