"""Figures of the experiment on the decoder language model."""

from typing import Any

import numpy as np
from foliax.experiments.figures import PALETTE
from foliax.extras import require

CAPTIONS = {
  "speed": "Tokens decoded in a second on the CPU, side by side in one run; dots are rounds, bars"
  " their medians.",
  "adaptation": "Low-rank adaptation to Python's manual: loss on held-out rows before and after,"
  " mean over seeds; a line a row.",
  "heat": "How likely the model finds each token of a text: the darker, the more surprising.",
}
COLOURS = {"foliax": "blue", "transformers": "orange", "llama.cpp": "green"}


def draw(results: dict[str, Any]) -> dict[str, Any]:
  """All figures, by name, in the order in which a reader wants them."""
  pyplot = require("matplotlib.pyplot", "experiments")
  drawn = {
    "speed": _speed(pyplot, results["speed"]["seconds"]),
    "adaptation": _adaptation(pyplot, results["adaptations"]),
    "heat": _heat(pyplot, results["heat"]),
  }
  for figure in drawn.values():
    pyplot.close(figure)
  return drawn


def _speed(pyplot, seconds):
  arms = [name.rsplit(" ", 1) for name in seconds if name[-1].isdigit()]
  batches = sorted({int(batch) for _, batch in arms})
  libraries = [name for name in COLOURS if any(name == arm for arm, _ in arms)]
  figure, ax = pyplot.subplots(figsize=(7.2, 3.2))
  width = 0.8 / len(libraries)
  for i, library in enumerate(libraries):
    for j, batch in enumerate(batches):
      if f"{library} {batch}" not in seconds:
        continue
      rates = batch / np.asarray(seconds[f"{library} {batch}"])
      x = j + (i - (len(libraries) - 1) / 2) * width
      colour = PALETTE[COLOURS[library]]
      label = library if j == 0 else None
      ax.bar(x, np.median(rates), width * 0.9, color=colour, alpha=0.55, label=label)
      ax.plot(np.full(len(rates), x), rates, ".", color=colour, markersize=5)
  ax.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
  ax.set_ylabel("tokens a second")
  ax.legend()
  return figure


def _adaptation(pyplot, adaptations):
  before = np.mean([a["before"] for a in adaptations], 0)
  after = np.mean([a["after"] for a in adaptations], 0)
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.0, 3.2))
  for a, b in zip(before, after, strict=True):
    left.plot([0, 1], [a, b], "o-", color=PALETTE["blue"], alpha=0.5, markersize=4)
  left.set_xticks([0, 1], ["before", "after"])
  left.set_xlim(-0.3, 1.3)
  left.set_ylabel("held-out loss (nats a token)")
  for run in adaptations:
    right.plot(run["training"], color=PALETTE["grey"], alpha=0.6)
  right.set_xlabel("step")
  right.set_ylabel("training loss")
  return figure


def _heat(pyplot, heat):
  scores = np.asarray(heat["log probs"])
  figure, ax = pyplot.subplots(figsize=(9.0, 1.6))
  ax.axis("off")
  figure.canvas.draw()
  renderer = figure.canvas.get_renderer()
  x, y = 0.0, 0.8
  for token, score in zip(heat["tokens"], scores, strict=True):
    shade = float(np.clip(-score / 10, 0, 1))
    box = {"facecolor": PALETTE["orange"], "alpha": shade, "edgecolor": "none", "pad": 1.5}
    text = ax.text(x, y, token.replace("\n", "⏎"), fontsize=12, bbox=box, va="center")
    extent = text.get_window_extent(renderer).transformed(ax.transData.inverted())
    x += extent.width
    if x > 0.9:
      x, y = 0.0, y - 0.35
  return figure
