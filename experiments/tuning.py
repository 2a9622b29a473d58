"""Real tuning tasks: the accuracy of a support vector machine against its two hyper-parameters.

Data are those bundled with scikit-learn, so that nothing is downloaded. A point of [0,1]^2 is
(log10 C, log10 gamma) on a fixed range. One evaluation is one 3-fold cross-validation; its noise is
that of the random folds, as in practice. `Task.truth` averages over many fold seeds.

What `survey` measured (9 x 9 grid, 5 fold seeds, scikit-learn 1.9), as a scale for sigma and L:

  task               rows  noise (at the best point)  steepest slope  best mean at
  svm-breast-cancer   400  .0043 (.0037)                         2.5  .983 (.75, .25)
  svm-digits          300  .0154 (.0053)                         5.7  .947 (.75, .25)
"""

from collections.abc import Sequence

import numpy as np
from foliax.extras import require

FOLDS = 3
TRUTH_SEEDS = 8
_FIRST_TRUTH_SEED = 1_000_000  # apart from the seeds anyone evaluates with

# name -> (loader, rows kept, range of log10 C, range of log10 gamma)
_TASKS = {
  "svm-breast-cancer": ("load_breast_cancer", 400, (-2.0, 3.0), (-4.0, 1.0)),
  "svm-digits": ("load_digits", 300, (-2.0, 3.0), (-5.0, 0.0)),
}
NAMES = tuple(_TASKS)


class Task:
  """Cross-validated accuracy of an RBF support vector machine, to be maximised on [0,1]^2."""

  dim = 2

  def __init__(
    self,
    name: str,
    features: np.ndarray,
    labels: np.ndarray,
    log10_c: tuple[float, float],
    log10_gamma: tuple[float, float],
  ):
    self.name = name
    self.features = features
    self.labels = labels
    self.log10_c = log10_c
    self.log10_gamma = log10_gamma
    self._truths: dict[tuple[float, ...], float] = {}

  def hyper_parameters(self, x: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The `C` and `gamma` that a point of [0,1]^2 stands for.

    Raises:
      ValueError: x is not two finite numbers in [0, 1].
    """
    point = np.asarray(x, dtype=np.float64)
    if point.shape != (2,) or not np.all((point >= 0) & (point <= 1)):
      raise ValueError(f"x must be two numbers in [0, 1] for task {self.name!r}; got {x!r}")
    (c_low, c_high), (gamma_low, gamma_high) = self.log10_c, self.log10_gamma
    return {
      "C": float(10 ** (c_low + point[0] * (c_high - c_low))),
      "gamma": float(10 ** (gamma_low + point[1] * (gamma_high - gamma_low))),
    }

  def evaluate(self, x: Sequence[float] | np.ndarray, seed: int, folds: int = FOLDS) -> float:
    """Mean accuracy on held-out folds, features standardised on the training folds.

    Args:
      x: a point of [0,1]^2.
      seed: shuffles the folds; the same x and seed give the same value.
      folds: how many of the three folds are held out in turn, 1 to 3; 1 is thrice as fast and
        noisier.
    Returns:
      Accuracy in [0, 1].
    Raises:
      ValueError: x is not two numbers in [0, 1], or folds is not 1, 2 or 3.
    """
    if folds not in range(1, FOLDS + 1):
      raise ValueError(f"folds must be 1 to {FOLDS}; got {folds!r}")
    svm = require("sklearn.svm", "experiments")
    selection = require("sklearn.model_selection", "experiments")
    chosen = self.hyper_parameters(x)
    splitter = selection.StratifiedKFold(FOLDS, shuffle=True, random_state=int(seed) % 2**32)
    scores = []
    for train, test in list(splitter.split(self.features, self.labels))[:folds]:
      mean, deviation = self.features[train].mean(0), self.features[train].std(0)
      scale = np.where(deviation > 0, deviation, 1.0)
      model = svm.SVC(kernel="rbf", **chosen)
      model.fit((self.features[train] - mean) / scale, self.labels[train])
      predicted = model.predict((self.features[test] - mean) / scale)
      scores.append(np.mean(predicted == self.labels[test]))
    return float(np.mean(scores))

  def truth(self, x: Sequence[float] | np.ndarray) -> float:
    """Mean of `evaluate` over `TRUTH_SEEDS` fold seeds of its own; computed once per point."""
    self.hyper_parameters(x)
    point = tuple(float(value) for value in np.asarray(x))
    if point not in self._truths:
      seeds = range(_FIRST_TRUTH_SEED, _FIRST_TRUTH_SEED + TRUTH_SEEDS)
      self._truths[point] = float(np.mean([self.evaluate(x, seed) for seed in seeds]))
    return self._truths[point]


def load(name: str) -> Task:
  """The tuning task of that name, one of `NAMES`.

  Raises:
    ValueError: unknown name.
    ModuleNotFoundError: scikit-learn is not installed.
  """
  if name not in _TASKS:
    raise ValueError(f"unknown tuning task {name!r}; use one of {', '.join(NAMES)}")
  loader, rows, log10_c, log10_gamma = _TASKS[name]
  datasets = require("sklearn.datasets", "experiments")
  features, labels = getattr(datasets, loader)(return_X_y=True)
  selection = require("sklearn.model_selection", "experiments")
  features, _, labels, _ = selection.train_test_split(
    features, labels, train_size=rows, stratify=labels, random_state=0
  )
  return Task(name, np.asarray(features, np.float64), labels, log10_c, log10_gamma)


def survey(task: Task, points: int = 9, repeats: int = 8) -> dict[str, float | list[float]]:
  """What a coarse grid says of a task: noise, steepest slope, best point.

  Args:
    task: the task.
    points: grid points an axis.
    repeats: evaluations a grid point, with seeds 0, 1, ...
  Returns:
    `noise`, the pooled standard deviation of one evaluation; `noise_at_best`, the same at the best
    grid point; `slope`, the largest difference of neighbouring means over their distance (a lower
    bound on a Lipschitz constant, of means that still have noise / sqrt(repeats)); `best` and
    `best_x`.
  """
  axis = np.linspace(0, 1, points)
  values = np.array(
    [[[task.evaluate((a, b), seed) for seed in range(repeats)] for b in axis] for a in axis]
  )
  mean, deviation = values.mean(-1), values.std(-1, ddof=1)
  step = axis[1]
  slope = max(np.abs(np.diff(mean, axis=0)).max(), np.abs(np.diff(mean, axis=1)).max()) / step
  i, j = np.unravel_index(mean.argmax(), mean.shape)
  return {
    "noise": float(np.sqrt(np.mean(deviation**2))),
    "noise_at_best": float(deviation[i, j]),
    "slope": float(slope),
    "best": float(mean[i, j]),
    "best_x": [float(axis[i]), float(axis[j])],
  }
