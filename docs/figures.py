"""Draws the figures of the README and of the pages in this folder: `python docs/figures.py`.

Takes half a minute. The same versions of JAX and matplotlib give the same files, byte for byte.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from foliax.experiments import figures
from foliax.experiments.figures import PALETTE, SURFACE
from foliax.search import benchmarks, cgp
from matplotlib import pyplot

CALLS, NOISE = 300, 0.005
CAPTIONS = {
  "active-set": "A function of two variables, and the part of it that may still hold the maximum"
  " after 10, 30, 100 and 300 noisy calls. Grey: proven to be below the best value found.",
  "bracket": "Left: the two certified bounds close in on the maximum. Right: the certified gap, and"
  " the regret that it bounds, against the number of calls.",
  "envelopes": "A function of one variable between its Lipschitz envelopes, after five observations"
  " with error bars; the active set is where the upper envelope is above the best lower bound.",
}


def search():
  """One run on the two-dimensional `wavy`: its history, and the active set on a grid."""
  cells = 96
  axis = (np.arange(cells) + 0.5) / cells
  grid = jnp.asarray(np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2), jnp.float32)
  problem = benchmarks.get("wavy")
  _, history = cgp.run(
    jax.random.key(0),
    lambda x, key: problem.function(x) + NOISE * jax.random.normal(key),
    cgp.Config(dim=2, capacity=CALLS),
    CALLS,
    lipschitz=problem.lipschitz,
    sigma=NOISE,
    observe=lambda state: cgp.upper_env(grid, state)[0] >= cgp.lower_bound(state),
  )
  square = lambda values: np.asarray(values).reshape(*values.shape[:-1], cells, cells)
  return problem, history, square(problem.function(grid)), square(history.observed)


def active_set(history, value, active):
  figure, axes = pyplot.subplots(1, 4, figsize=(9.6, 2.75), sharex=True, sharey=True)
  shown = {"origin": "lower", "extent": (0, 1, 0, 1), "interpolation": "nearest"}
  for ax, calls in zip(axes, (10, 30, 100, 300), strict=True):
    ax.grid(False)
    inside = active[calls - 1]
    ax.imshow(np.where(inside, np.nan, 0.5), cmap="gray", vmin=0, vmax=1, alpha=0.35, **shown)
    ax.imshow(np.where(inside, value, np.nan), vmin=value.min(), vmax=value.max(), **shown)
    ax.plot(*np.asarray(history.x)[:calls].T, ".", color=PALETTE["orange"], markersize=2.8)
    ax.set_title(f"{calls} calls: {inside.mean():.0%} left", fontsize=10)
    ax.set_xlabel(f"certified gap {history.certificate.gap[calls - 1]:.2g}")
    ax.set_xticks([0, 0.5, 1])
    ax.set_yticks([0, 0.5, 1])
  return figure


def bracket(problem, history):
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.2))
  calls, certificate = np.arange(1, CALLS + 1), history.certificate
  regret = problem.optimum - np.asarray(problem.function(certificate.x_hat))
  left.fill_between(
    calls, certificate.lower, certificate.upper, color=PALETTE["blue"], alpha=0.25, linewidth=0
  )
  left.plot(calls, certificate.upper, "-", color=PALETTE["blue"], label="max U, certified above")
  left.plot(calls, certificate.lower, "--", color=PALETTE["green"], label="ℓ, certified below")
  left.axhline(problem.optimum, color=PALETTE["orange"], linestyle=":", label="true maximum")
  left.set(xscale="log", ylim=(0, 2), xlabel="calls", ylabel="value")
  right.plot(calls, certificate.gap, "-", color=PALETTE["blue"], label="certified gap")
  label = "regret (known here, not to the search)"
  right.plot(calls, np.maximum(regret, 1e-4), "--", color=PALETTE["orange"], label=label)
  right.set(xscale="log", yscale="log", xlabel="calls", ylim=(8e-5, 5))
  for ax in (left, right):
    ax.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    ax.minorticks_off()
    ax.legend()
  return figure


def envelopes():
  """Five arms on a line, two of them pulled four times as often as the others."""
  f = lambda x: 0.5 + 0.22 * np.sin(9 * x) + 0.25 * x
  lipschitz = 2.3
  x = np.array([0.08, 0.3, 0.55, 0.8, 0.95])
  r = np.array([0.1, 0.1, 0.05, 0.05, 0.1])
  mean = f(x) + np.array([0.03, -0.04, 0.02, -0.01, 0.04])
  grid = np.linspace(0, 1, 801)
  distance = lipschitz * abs(grid[:, None] - x)
  upper, lower = (mean + r + distance).min(1), (mean - r - distance).max(1)
  best = (mean - r).max()
  figure, ax = pyplot.subplots(figsize=(9.6, 3.5))
  ax.fill_between(grid, lower, upper, color=PALETTE["grey"], alpha=0.2, linewidth=0)
  ax.plot(grid, upper, "-", color=PALETTE["blue"], label="upper envelope U(x)")
  ax.plot(grid, lower, "--", color=PALETTE["green"], label="lower envelope")
  ax.plot(grid, f(grid), ":", color=PALETTE["orange"], label="f(x), not known")
  ax.errorbar(x, mean, r, fmt="o", color=PALETTE["violet"], capsize=3, label="arms: mean ± radius")
  ax.axhline(best, color=PALETTE["magenta"], linewidth=1.2, label="ℓ, the best lower bound")
  for start, end in runs_of(upper >= best):
    ax.plot([grid[start], grid[end]], [-0.04, -0.04], color=PALETTE["blue"], linewidth=6,
            linestyle="-", solid_capstyle="butt")  # fmt: skip
  ax.text(0.005, 0.02, "active set", color=PALETTE["blue"], va="bottom")
  top = upper.argmax()
  arrow = {"arrowstyle": "<->", "color": PALETTE["magenta"], "shrinkA": 0, "shrinkB": 0}
  ax.annotate("", (grid[top], upper[top]), (grid[top], best), arrowprops=arrow)
  ax.text(grid[top] + 0.012, (upper[top] + best) / 2, "gap", color=PALETTE["magenta"], va="center",
          backgroundcolor=SURFACE)  # fmt: skip
  ax.set(xlim=(0, 1), ylim=(-0.08, 1.45), xlabel="x")
  figure.legend(loc="outside lower center", ncols=5, fontsize=9)
  return figure


def runs_of(mask):
  """First and last index of every run of true values."""
  edges = np.diff(np.concatenate([[0], mask.astype(int), [0]]))
  return zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True)


def main(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  with figures.style():
    problem, history, value, active = search()
    drawn = {
      "active-set": active_set(history, value, active),
      "bracket": bracket(problem, history),
      "envelopes": envelopes(),
    }
    for name, figure in drawn.items():
      path = folder / f"{name}.svg"
      path.write_text(figures.standalone(figures.svg(figure, name, CAPTIONS[name])), "utf-8")
      print(f"wrote {path}")


if __name__ == "__main__":
  main(
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "figures")
  )
