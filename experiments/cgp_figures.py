"""Figures of the experiment on Certificate-Guided Pruning."""

from typing import Any

import numpy as np
from foliax.experiments.figures import PALETTE
from foliax.extras import require

CAPTIONS = {
  "active-set": "What can still be the optimum: the active set of CGP on a function of two"
  " variables (bright: high values), shrinking as calls are spent; dots are the points evaluated.",
  "regret": "Regret of the point that each method would recommend, against calls; mean over seeds,"
  " with 95 % intervals for CGP and random search.",
  "gap": "The certified gap of CGP against calls, mean and range over seeds, and the regret that"
  " it bounds; crosses: random search's gap from the same envelopes; dotted: where a run may stop.",
  "adaptive": "CGP-Adaptive without the true constant: what it ends with, by where it starts.",
  "high-dimensions": "Regret of trust regions and of random search in more dimensions; one dot a"
  " seed.",
  "tuning": "True accuracy of the recommended support vector machine against calls, real data; mean"
  " over seeds, with 95 % intervals for CGP-Adaptive and random search.",
  "botorch": "Final regret with as few calls as BoTorch was given; one dot a seed, bars are means.",
  "speed": "Seconds of one ask and tell after many observations in six dimensions.",
}
COLOURS = {
  "cgp": "blue",
  "adaptive": "blue",
  "hybrid": "violet",
  "trust region": "blue",
  "random": "grey",
  "uniform-in-A_t": "brown",
  "lipo": "green",
  "gp-ucb": "orange",
  "cma": "magenta",
  "optuna-tpe": "green",
}
DASHES = {"optuna-tpe": "--", "uniform-in-A_t": ":", "lipo": "-.", "cma": "--", "random": "-"}


def draw(results: dict[str, Any]) -> dict[str, Any]:
  """All figures, by name, in the order in which a reader wants them."""
  pyplot = require("matplotlib.pyplot", "experiments")
  drawn = {
    "active-set": _active_set(pyplot, results["picture"]),
    "regret": _regret(pyplot, results),
    "gap": _gap(pyplot, results),
    "adaptive": _adaptive(pyplot, results),
    "high-dimensions": _high(pyplot, results["high"]),
    "tuning": _tuning(pyplot, results["tuning"]),
  }
  if "botorch" in results:
    drawn["botorch"] = _botorch(pyplot, results["botorch"])
  drawn["speed"] = _speed(pyplot, results["speed"])
  for figure in drawn.values():
    pyplot.close(figure)
  return drawn


def _active_set(pyplot, picture):
  cells = picture["cells"]
  value = np.asarray(picture["value"]).reshape(cells, cells)
  figure, axes = pyplot.subplots(1, 4, figsize=(9.6, 2.9), sharex=True, sharey=True)
  for ax, panel in zip(axes, picture["panels"], strict=True):
    active = np.array(list(panel["active"])).reshape(cells, cells) == "1"
    ax.grid(False)
    ax.imshow(
      np.where(active, value, np.nan), origin="lower", extent=(0, 1, 0, 1), interpolation="nearest",
      vmin=value.min(), vmax=value.max(),
    )  # fmt: skip
    arms = np.asarray(panel["arms"])
    ax.plot(*arms.T, ".", color=PALETTE["orange"], markersize=2.6)
    ax.set_title(f"{panel['calls']} calls, {active.mean():.0%} active", fontsize=9.5)
    ax.set_xlabel(f"certified gap {panel['gap']:.2g}")
    ax.set_xticks([0, 0.5, 1])
    ax.set_yticks([0, 0.5, 1])
  return figure


def _curve(ax, x, rows, name, *, band):
  rows = np.asarray(rows)
  colour = PALETTE[COLOURS[name]]
  ax.plot(x, rows.mean(0), DASHES.get(name, "-"), color=colour, label=name, linewidth=1.7)
  if band and len(rows) > 1:
    half = 1.96 * rows.std(0, ddof=1) / len(rows) ** 0.5
    ax.fill_between(
      x, rows.mean(0) - half, rows.mean(0) + half, color=colour, alpha=0.2, linewidth=0
    )


def _settings(pyplot, results, height=5.4):
  names = list(results["settings"])
  columns = len(names) // 2
  figure, axes = pyplot.subplots(2, columns, figsize=(9.6, height), sharex=True, sharey="col")
  # Settings come problem by problem: one column a problem, the low noise above.
  return figure, {name: axes[i % 2, i // 2] for i, name in enumerate(names)}


def _title(name):
  problem, sigma = name.rsplit(" ", 1)
  return f"{problem.capitalize()}, noise {sigma}"


def _regret(pyplot, results):
  figure, axes = _settings(pyplot, results)
  steps = results["steps"]
  shown = ("random", "uniform-in-A_t", "lipo", "gp-ucb", "cma", "optuna-tpe", "hybrid", "cgp")
  for name, ax in axes.items():
    for arm in [arm for arm in shown if arm in results["settings"][name]]:
      rows = np.maximum(results["settings"][name][arm]["regret"], 1e-5)
      _curve(ax, steps, rows, arm, band=arm in ("cgp", "random"))
    ax.set(title=_title(name), xscale="log", yscale="log")
  _outer_labels(axes, "calls", "regret")
  handles = next(iter(axes.values())).get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=8, fontsize=9)
  return figure


def _outer_labels(axes, x, y):
  for ax in axes.values():
    ax.label_outer()
    if ax.get_subplotspec().is_last_row():
      ax.set_xlabel(x)
    if ax.get_subplotspec().is_first_col():
      ax.set_ylabel(y)


def _gap(pyplot, results):
  figure, axes = _settings(pyplot, results)
  steps = np.asarray(results["steps"])
  for name, ax in axes.items():
    arms = results["settings"][name]
    gap, regret = np.asarray(arms["cgp"]["gap"]), np.asarray(arms["cgp"]["regret"])
    blue = PALETTE["blue"]
    ax.plot(steps, gap.mean(0), color=blue, label="certified gap")
    ax.fill_between(steps, gap.min(0), gap.max(0), color=blue, alpha=0.2, linewidth=0)
    label = "regret (known here, not to the method)"
    ax.plot(steps, np.maximum(regret.mean(0), 1e-4), "--", color=PALETTE["orange"], label=label)
    random = np.mean(arms["random"]["final gap"])
    ax.plot(steps[-1], random, "x", color=PALETTE["grey"], label="gap of random search")
    ax.set(title=_title(name), xscale="log", yscale="log")
  first = next(iter(axes.values()))
  target = results["target gap"]
  first.axhline(target, color=PALETTE["green"], linestyle=":")
  stop = np.mean(results["stopping"]["calls"])
  first.plot(stop, target, "o", color=PALETTE["green"], label="stop at the target gap")
  _outer_labels(axes, "calls", "value")
  figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
  return figure


def _adaptive(pyplot, results):
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.4))
  arms = {"adaptive-0.25": "L / 4", "adaptive-1": "L", "adaptive-4": "4 L"}
  names = list(results["settings"])
  colours = ("orange", "blue", "violet")
  for i, (arm, colour) in enumerate(zip(arms, colours, strict=True)):
    for j, name in enumerate(names):
      runs = results["settings"][name][arm]
      at = j + 0.24 * (i - 1)
      label = f"starts at {arms[arm]}" if j == 0 else None
      last = [row[-1] for row in runs["regret"]]
      left.plot([at] * len(last), last, "o", color=PALETTE[colour], markersize=3.5, alpha=0.75)
      right.bar(at, np.mean(runs["excluded"]), 0.2, color=PALETTE[colour], label=label)
  left.set(title="Regret, one dot a seed", yscale="symlog")
  left.set_yscale("symlog", linthresh=1e-3)
  right.set(title="Runs that ever excluded the maximiser", ylim=(0, 1))
  for ax in (left, right):
    ax.set_xticks(range(len(names)), [n.replace(" ", "\n") for n in names])
  figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
  return figure


def _high(pyplot, high):
  figure, ax = pyplot.subplots(figsize=(9.6, 3.2))
  for i, runs in enumerate(high.values()):
    for j, arm in enumerate(("trust region", "random")):
      at = i + 0.3 * (j - 0.5)
      colour = PALETTE[COLOURS[arm]]
      label = {"trust region": "CGP-TR", "random": "random search"}[arm] if i == 0 else None
      ax.bar(at, np.mean(runs[arm]), 0.26, color=colour, alpha=0.55, label=label)
      ax.plot([at] * len(runs[arm]), runs[arm], "o", color=colour, markersize=3.5)
  ax.set_xticks(range(len(high)), list(high))
  ax.set_ylabel("regret")
  ax.legend(ncols=2)
  return figure


def _tuning(pyplot, tasks):
  figure, axes = pyplot.subplots(1, len(tasks), figsize=(9.6, 3.6), squeeze=False)
  for ax, (name, arms) in zip(axes[0], tasks.items(), strict=True):
    for arm, runs in arms.items():
      rows = 100 * np.asarray([run["accuracy"] for run in runs])
      _curve(ax, runs[0]["calls"], rows, arm, band=arm in ("adaptive", "random"))
    ax.set(title=name, xlabel="calls (each a 3-fold cross-validation)")
    best = max(max(run["accuracy"]) for runs in arms.values() for run in runs)
    ax.set_ylim(100 * best - 12, 100 * best + 1)
  axes[0, 0].set_ylabel("true accuracy, %")
  handles = axes[0, 0].get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=7, fontsize=9)
  return figure


def _botorch(pyplot, problems):
  figure, axes = pyplot.subplots(1, len(problems), figsize=(9.6, 3.2))
  for ax, (problem, arms) in zip(axes, problems.items(), strict=True):
    for i, (arm, regret) in enumerate(arms.items()):
      colour = PALETTE[COLOURS.get(arm, "magenta")]
      ax.barh(i, np.mean(regret), 0.6, color=colour, alpha=0.55)
      ax.plot(regret, [i] * len(regret), "o", color=colour, markersize=3.5)
    ax.set_yticks(range(len(arms)), list(arms))
    ax.set(title=problem.capitalize(), xlabel="regret")
  return figure


def _speed(pyplot, speed):
  figure, ax = pyplot.subplots(figsize=(7.6, 0.9 + 0.5 * len(speed)))
  names = sorted(speed, key=lambda name: np.median(speed[name]), reverse=True)
  for i, name in enumerate(names):
    milliseconds = 1e3 * np.asarray(speed[name])
    ax.barh(i, np.median(milliseconds), 0.6, color=PALETTE["blue" if name == "cgp" else "grey"])
    ax.plot(milliseconds, [i] * len(milliseconds), "|", color=PALETTE["orange"])
    ax.annotate(f" {np.median(milliseconds):.3g} ms", (milliseconds.max(), i), va="center")
  ax.set_yticks(range(len(names)), names)
  ax.set(xscale="log", xlabel="milliseconds, median bar and single rounds")
  ax.margins(x=0.15)
  return figure
