"""Claims about measured numbers: intervals over seeds, and the verdict that follows from them.

A claim compares a statistic with a threshold. It *holds* when the whole confidence interval lies
on the right side, *fails* when the whole interval lies on the wrong side, and is *undecided*
otherwise. A claim without a measurement is *not measured*; it is shown, never dropped.

Intervals of means are bias-corrected and accelerated (BCa) bootstrap intervals (Efron 1987) from
`scipy.stats.bootstrap` with a fixed seed, so that the same numbers give the same verdict. A plain
bootstrap is too narrow for few samples; its level is expanded as Hesterberg proposes (2015, "What
teachers should know about the bootstrap"). In 500 draws of ten samples the truth lay inside in 94 %
(normal) and 93 % (exponential), where the plain interval had 90 and 86 %; of five normal samples in
88 % (80 %). No bootstrap leaves the range of its samples: use eight seeds or more.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsInt

import numpy as np
from foliax import extras
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
RELATIONS = ("<=", ">=", "<", ">")
VERDICTS = ("holds", "fails", "undecided", "not measured")
_RESAMPLES = 9999
_SEED = 0


class Interval(NamedTuple):
  """A statistic and its 95 % confidence interval, all in the unit of the samples."""

  value: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Claim:
  """One relation that an experiment could refute, and what the measurement says about it.

  Attributes:
    id: short name, e.g. `"R3"`; unique within an experiment.
    sentence: what is claimed, in one sentence that a reader without the code understands.
    statistic: measured value with its interval, or None when it was not measured.
    relation: how the statistic should compare with the threshold, one of `RELATIONS`.
    threshold: the number to compare with, in the unit of the statistic.
    verdict: one of `VERDICTS`.
    note: what a reader should know besides, e.g. why nothing was measured.
  """

  id: str
  sentence: str
  statistic: Interval | None
  relation: str
  threshold: float
  verdict: str
  note: str = ""

  def as_dict(self) -> dict[str, Any]:
    """JSON form; an unbounded end of the interval is written as null."""
    fields = dataclasses.asdict(self)
    if self.statistic is not None:
      bounds = self.statistic._asdict()
      fields["statistic"] = {k: v if math.isfinite(v) else None for k, v in bounds.items()}
    return fields

  @classmethod
  def from_dict(cls, fields: dict[str, Any]) -> "Claim":
    """Inverse of `as_dict`."""
    fields = dict(fields)
    if (bounds := fields["statistic"]) is not None:
      low = -math.inf if bounds["low"] is None else bounds["low"]
      high = math.inf if bounds["high"] is None else bounds["high"]
      fields["statistic"] = Interval(bounds["value"], low, high)
    return cls(**fields)


def claim(
  id: str,
  sentence: str,
  interval: Interval | None,
  relation: str,
  threshold: float | int,
  note: str = "",
) -> Claim:
  """States a claim and decides it.

  Args:
    id, sentence, relation, threshold, note: see `Claim`.
    interval: the statistic with its interval; None when it was not measured.
  Returns:
    The claim with its verdict.
  Raises:
    ValueError: unknown relation, or a threshold or value that is not finite.
  """
  if relation not in RELATIONS:
    raise ValueError(f"relation {relation!r} of claim {id} is unknown; use one of {RELATIONS}")
  if not math.isfinite(threshold):
    raise ValueError(f"threshold {threshold} of claim {id} must be a finite number")
  threshold = float(threshold)
  if interval is None:
    return Claim(id, sentence, None, relation, threshold, "not measured", note)
  interval = Interval(*(float(x) for x in interval))
  if not math.isfinite(interval.value) or not interval.low <= interval.value <= interval.high:
    raise ValueError(
      f"interval {tuple(interval)} of claim {id} must have low <= value <= high and a finite "
      "value; pass None when nothing was measured"
    )
  verdict = _verdict(interval, relation, threshold)
  return Claim(id, sentence, interval, relation, threshold, verdict, note)


def _verdict(interval: Interval, relation: str, threshold: float) -> str:
  compare: dict[str, Callable[[float], bool]] = {
    "<=": lambda x: x <= threshold,
    ">=": lambda x: x >= threshold,
    "<": lambda x: x < threshold,
    ">": lambda x: x > threshold,
  }
  ends = [compare[relation](end) for end in (interval.low, interval.high)]
  return "holds" if all(ends) else "undecided" if any(ends) else "fails"


def mean_interval(samples: ArrayLike) -> Interval:
  """Mean of independent samples, usually one per seed, with its BCa bootstrap interval.

  A single sample has an unbounded interval; identical samples have an interval of width zero.

  Args:
    samples: `[n]` finite numbers in any unit.
  Raises:
    ValueError: no samples, or some are not finite.
  """
  return _bootstrap((_samples("samples", samples),), lambda x, axis=-1: x.mean(axis))


def difference_interval(a: ArrayLike, b: ArrayLike, paired: bool = True) -> Interval:
  """`mean(a) - mean(b)` with its BCa bootstrap interval.

  Args:
    a: `[n]` finite numbers.
    b: `[n]` finite numbers in the same unit, `[m]` when not paired.
    paired: whether `a[i]` and `b[i]` share their seed; then seeds are resampled, not samples.
  Raises:
    ValueError: no samples, some are not finite, or paired samples of different lengths.
  """
  a, b = _samples("a", a), _samples("b", b)
  if paired:
    _check_paired(a, b)
    return mean_interval(a - b)
  return _bootstrap((a, b), lambda x, y, axis=-1: x.mean(axis) - y.mean(axis))


def ratio_interval(a: ArrayLike, b: ArrayLike, paired: bool = True) -> Interval:
  """`mean(a) / mean(b)` with its BCa bootstrap interval; arguments as in `difference_interval`.

  Raises:
    ValueError: as `difference_interval`, or some of `b` are not positive, where a ratio means
      nothing: compare by `difference_interval` then.
  """
  a, b = _samples("a", a), _samples("b", b)
  if (b <= 0).any():
    raise ValueError(f"b has a sample of {b.min()}, must be positive; use difference_interval")
  if paired:
    _check_paired(a, b)
  return _bootstrap((a, b), lambda x, y, axis=-1: x.mean(axis) / y.mean(axis), paired=paired)


def proportion_interval(successes: SupportsInt, n: SupportsInt) -> Interval:
  """Share of successes in n independent trials with its Clopper-Pearson (exact) interval.

  Args:
    successes: number of successes, 0 to n.
    n: number of trials, at least 1.
  Raises:
    ValueError: n below 1, or successes outside 0..n.
  """
  successes, n = int(successes), int(n)
  if n < 1 or not 0 <= successes <= n:
    raise ValueError(f"successes {successes} of n {n}: need n >= 1 and 0 <= successes <= n")
  stats = extras.require("scipy.stats", "experiments")
  low, high = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="exact")
  return Interval(successes / n, float(low), float(high))


def worst(intervals: Sequence[Interval], relation: str) -> Interval:
  """The interval that decides a claim about *all* of several settings.

  Componentwise maximum for `<=` and `<`, minimum for `>=` and `>`: the claim then holds only if it
  holds in every setting, and fails as soon as it fails in one (an intersection-union test).

  Raises:
    ValueError: no intervals, or an unknown relation.
  """
  if relation not in RELATIONS:
    raise ValueError(f"relation {relation!r} is unknown; use one of {RELATIONS}")
  if not intervals:
    raise ValueError("intervals is empty; need at least one setting")
  pick = max if relation in ("<=", "<") else min
  return Interval(*(pick(component) for component in zip(*intervals, strict=True)))


def _samples(name: str, values: ArrayLike) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or array.size == 0:
    raise ValueError(f"{name} has shape {array.shape}; need a list of at least one number")
  if not np.isfinite(array).all():
    bad = int((~np.isfinite(array)).sum())
    raise ValueError(
      f"{name} has {bad} of {array.size} values that are not finite; count those runs as failures "
      "(proportion_interval) instead of dropping them"
    )
  return array


def _check_paired(a: np.ndarray, b: np.ndarray) -> None:
  if a.size != b.size:
    raise ValueError(
      f"a has {a.size} samples and b has {b.size}; pair them by seed or pass paired=False"
    )


def _expanded_level(n: int) -> float:
  """Level at which a bootstrap of n samples is about as wide as Student's interval (Hesterberg)."""
  stats = extras.require("scipy.stats", "experiments")
  quantile = math.sqrt(n / (n - 1)) * stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)
  return float(1 - 2 * stats.norm.cdf(-quantile))


def _bootstrap(
  data: tuple[np.ndarray, ...], statistic: Callable[..., Any], paired: bool = False
) -> Interval:
  value = float(statistic(*data))
  if any(x.size < 2 for x in data):
    return Interval(value, -math.inf, math.inf)
  if all((x == x[0]).all() for x in data):
    return Interval(value, value, value)
  stats = extras.require("scipy.stats", "experiments")
  level = _expanded_level(min(x.size for x in data))
  for method in ("BCa", "percentile"):  # BCa is undefined when the jackknife has no spread
    with warnings.catch_warnings(), np.errstate(all="ignore"):
      warnings.simplefilter("ignore")
      bounds = stats.bootstrap(
        data,
        statistic,
        paired=paired,
        vectorized=True,
        confidence_level=level,
        n_resamples=_RESAMPLES,
        method=method,
        rng=np.random.default_rng(_SEED),
      ).confidence_interval
    low, high = float(bounds.low), float(bounds.high)
    if math.isfinite(low) and math.isfinite(high):
      break
  # Heavily skewed samples can put a BCa bound past the estimate itself.
  return Interval(value, min(low, value), max(high, value))
