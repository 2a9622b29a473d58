"""Optimisers of other libraries behind one interface, as a stand-alone script.

Run by any Python interpreter, also one that does not have foliax: this file imports nothing of it.
It reads one JSON object a line on stdin and answers one a line on stdout:

  {"command": "start", "name": "cma", "dim": 2, "seed": 0}   -> {"ok": true}
  {"command": "ask"}                                         -> {"x": [..], "seconds": s}
  {"command": "tell", "x": [..], "y": 0.3}                   -> {"seconds": s}
  {"command": "preload", "xs": [[..], ..], "ys": [..]}       -> {"seconds": s}
  {"command": "stop"}                                        -> {"ok": true}

`seconds` are spent inside the optimiser, by `time.perf_counter`. A failure answers {"error": text},
with {"missing": module} if a library is not installed. Every optimiser maximises on [0,1]^dim; a
`y` that is null or not finite is a failed evaluation.
"""

import json
import math
import os
import sys
import time
import warnings

THREADS = 2


class CMA:
  """CMA-ES with box bounds, one candidate at a time; source: the `cma` package."""

  def __init__(self, dim, seed):
    import cma

    options = {"bounds": [0, 1], "seed": seed % 2**31 + 1, "verbose": -9}  # 0 is "from the clock"
    self._strategy = cma.CMAEvolutionStrategy([0.5] * dim, 0.3, options)
    self._waiting = []
    self._told = []

  def ask(self):
    if not self._waiting:
      self._waiting = list(self._strategy.ask())
    return [float(value) for value in self._waiting.pop()]

  def tell(self, x, y):
    """A generation is used once it is complete; a failed evaluation counts as its worst."""
    self._told.append((x, math.inf if y is None else -y))
    if len(self._told) < self._strategy.popsize:
      return
    worst = max((cost for _, cost in self._told if math.isfinite(cost)), default=0.0)
    points, costs = zip(*self._told, strict=True)
    self._strategy.tell(list(points), [min(cost, worst) for cost in costs])
    self._told, self._waiting = [], []

  def preload(self, xs, ys):
    """Points that CMA-ES did not ask for, told generation by generation."""
    for x, y in zip(xs, ys, strict=True):
      if not self._waiting:
        self._waiting = list(self._strategy.ask())
      self.tell(x, y)


class OptunaTPE:
  """Tree-structured Parzen estimator with Optuna's default settings, in memory."""

  def __init__(self, dim, seed):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    self._optuna = optuna
    self._names = [f"x{i}" for i in range(dim)]
    sampler = optuna.samplers.TPESampler(seed=seed % 2**32)
    self._study = optuna.create_study(direction="maximize", sampler=sampler)
    self._open = {}

  def ask(self):
    trial = self._study.ask()
    x = [trial.suggest_float(name, 0.0, 1.0) for name in self._names]
    self._open[tuple(x)] = trial
    return x

  def tell(self, x, y):
    trial = self._open.pop(tuple(x), None)
    state = self._optuna.trial.TrialState
    if trial is not None:
      self._study.tell(trial, y, state=state.FAIL if y is None else state.COMPLETE)
    elif y is not None:
      self.preload([x], [y])

  def preload(self, xs, ys):
    distribution = self._optuna.distributions.FloatDistribution(0.0, 1.0)
    distributions = dict.fromkeys(self._names, distribution)
    self._study.add_trials(
      self._optuna.create_trial(
        params=dict(zip(self._names, x, strict=True)), distributions=distributions, value=y
      )
      for x, y in zip(xs, ys, strict=True)
      if y is not None
    )


class BotorchQNEI:
  """BoTorch: SingleTaskGP and qLogNoisyExpectedImprovement, q = 1, after 2 d + 1 Sobol points."""

  def __init__(self, dim, seed):
    import botorch
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    self._torch, self._botorch = torch, botorch
    self._dim = dim
    self._sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    self._xs, self._ys = [], []

  def _tensors(self):
    torch = self._torch
    x = torch.tensor(self._xs, dtype=torch.double)
    return x, torch.tensor(self._ys, dtype=torch.double)[:, None]

  def _fit(self, x, y):
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model

  def ask(self):
    if len(self._ys) < 2 * self._dim + 1:
      return self._sobol.draw(1, dtype=self._torch.double)[0].tolist()
    from botorch.acquisition.logei import qLogNoisyExpectedImprovement
    from botorch.optim import optimize_acqf

    x, y = self._tensors()
    acquisition = qLogNoisyExpectedImprovement(self._fit(x, y), X_baseline=x, prune_baseline=True)
    bounds = self._torch.tensor([[0.0] * self._dim, [1.0] * self._dim], dtype=self._torch.double)
    point, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=512)
    return point[0].clamp(0, 1).tolist()

  def tell(self, x, y):
    if y is not None:
      self._xs.append(list(x))
      self._ys.append(y)

  def preload(self, xs, ys):
    for x, y in zip(xs, ys, strict=True):
      self.tell(x, y)


class BotorchTuRBO(BotorchQNEI):
  """TuRBO-1 by Thompson sampling, q = 1, in BoTorch.

  Source: Eriksson et al. 2019, Scalable Global Optimization via Local Bayesian Optimization, with
  the constants of BoTorch's tutorial: side 0.8 in [0.5^7, 1.6], doubled after 10 successes (gains
  of more than 0.1 %), halved after max(4, d) failures, restarted from 2 d Sobol points below.
  """

  def __init__(self, dim, seed):
    super().__init__(dim, seed)
    self._restart()

  def _restart(self):
    self._xs, self._ys = [], []
    self._side, self._successes, self._failures = 0.8, 0, 0

  def ask(self):
    torch = self._torch
    if len(self._ys) < 2 * self._dim:
      return self._sobol.draw(1, dtype=torch.double)[0].tolist()
    from botorch.generation import MaxPosteriorSampling

    x, y = self._tensors()
    model = self._fit(x, y)
    lengthscale = model.covar_module.lengthscale.detach().reshape(-1)
    weight = lengthscale / lengthscale.log().mean().exp()
    centre = x[y.argmax()]
    low = (centre - weight * self._side / 2).clamp(0, 1)
    high = (centre + weight * self._side / 2).clamp(0, 1)
    count = min(5000, max(2000, 200 * self._dim))
    seed = int(torch.randint(2**31, ()))
    sobol = torch.quasirandom.SobolEngine(self._dim, scramble=True, seed=seed)
    moved = torch.rand(count, self._dim) <= min(20 / self._dim, 1.0)
    moved[torch.arange(count), torch.randint(self._dim, (count,))] = True
    candidates = low + (high - low) * sobol.draw(count, dtype=torch.double)
    candidates = torch.where(moved, candidates, centre)
    with torch.no_grad():
      return MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=1)[0].tolist()

  def tell(self, x, y):
    enough = len(self._ys) >= 2 * self._dim
    if enough:
      best = max(self._ys)
      if y is not None and y > best + 1e-3 * abs(best):
        self._successes, self._failures = self._successes + 1, 0
      else:
        self._successes, self._failures = 0, self._failures + 1
      if self._successes == 10:
        self._side, self._successes = min(2 * self._side, 1.6), 0
      elif self._failures >= max(4, self._dim):
        self._side, self._failures = self._side / 2, 0
    super().tell(x, y)
    if self._side < 0.5**7:
      self._restart()

  def preload(self, xs, ys):
    for x, y in zip(xs, ys, strict=True):
      super().tell(x, y)


OPTIMISERS = {
  "cma": CMA,
  "optuna-tpe": OptunaTPE,
  "botorch-qnei": BotorchQNEI,
  "botorch-turbo": BotorchTuRBO,
}


def _finite(y):
  return float(y) if y is not None and math.isfinite(y) else None


def answer(request, optimiser):
  """The reply to one request and the optimiser to go on with."""
  command = request.get("command")
  if command == "start":
    if request["name"] not in OPTIMISERS:
      raise ValueError(f"unknown optimiser {request['name']!r}; use one of {', '.join(OPTIMISERS)}")
    return {"ok": True}, OPTIMISERS[request["name"]](int(request["dim"]), int(request["seed"]))
  if command not in ("ask", "tell", "preload"):
    raise ValueError(f"unknown command {command!r}; use start, ask, tell, preload or stop")
  if optimiser is None:
    raise ValueError(f"{command} before start")
  reply = {}
  if command == "preload":
    ys = [_finite(y) for y in request["ys"]]
  begin = time.perf_counter()
  if command == "ask":
    reply["x"] = optimiser.ask()
  elif command == "tell":
    optimiser.tell(request["x"], _finite(request["y"]))
  else:
    optimiser.preload(request["xs"], ys)
  return {**reply, "seconds": time.perf_counter() - begin}, optimiser


def main():
  # Libraries may print: what they print must not reach the protocol.
  out = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  optimiser = None
  for line in sys.stdin:
    try:
      request = json.loads(line)
      if request.get("command") == "stop":
        reply = {"ok": True}
      else:
        reply, optimiser = answer(request, optimiser)
    except ModuleNotFoundError as error:
      reply = {"error": str(error), "missing": error.name}
    except Exception as error:
      reply = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(reply) + "\n")
    if reply == {"ok": True} and request.get("command") == "stop":
      return


if __name__ == "__main__":
  main()
