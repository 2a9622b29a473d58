"""Real inputs of the experiments: what they are, where they come from, and whether they load."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from foliax import extras
from foliax.experiments import registry
from foliax.experiments.registry import UserError


class Input(NamedTuple):
  """A data set or model.

  Attributes:
    description: what it is, in a few words.
    source: who made it and which package brings it.
    licence: under which terms.
    load: brings it into memory as named arrays, from an installed package or from a cache folder.
  """

  description: str
  source: str
  licence: str
  load: Callable[[], dict[str, np.ndarray]]


def _from_sklearn(loader: str) -> Callable[[], dict[str, np.ndarray]]:
  def load() -> dict[str, np.ndarray]:
    datasets = extras.require("sklearn.datasets", "experiments")
    bunch: Any = getattr(datasets, loader)()
    return {"features": bunch.data, "labels": bunch.target}

  return load


INPUTS: dict[str, Input] = {
  "digits": Input(
    "handwritten digits, 8 x 8 pixels of 17 grey levels, 10 classes",
    "UCI Optical Recognition of Handwritten Digits (test part), in scikit-learn",
    "CC BY 4.0",
    _from_sklearn("load_digits"),
  ),
  "breast-cancer": Input(
    "cell nuclei measured in breast tissue, malignant or benign",
    "UCI Breast Cancer Wisconsin (Diagnostic), in scikit-learn",
    "CC BY 4.0",
    _from_sklearn("load_breast_cancer"),
  ),
}


def fetch(names: Sequence[str]) -> list[str]:
  """Loads inputs and describes them.

  Args:
    names: keys of `INPUTS`; all of them when empty.
  Returns:
    One paragraph per input: name, shapes, size, source, licence.
  Raises:
    UserError: a name is unknown, or an input is not what it should be.
    ModuleNotFoundError: the package that brings it is missing; the message names the extra.
  """
  for name in names:
    if name not in INPUTS:
      raise UserError(f"unknown input {name!r}; {registry.nearest(name, INPUTS)}")
  return [_describe(name, INPUTS[name]) for name in names or INPUTS]


def _describe(name: str, entry: Input) -> str:
  arrays = entry.load()
  for part, array in arrays.items():
    if array.size == 0 or not np.isfinite(array).all():
      raise UserError(f"input {name!r}: its {part} are empty or not finite; reinstall its package")
  shapes = ", ".join(f"{part} {list(a.shape)} {a.dtype}" for part, a in arrays.items())
  size = sum(a.nbytes for a in arrays.values()) / 2**20
  return (
    f"{name}: {entry.description}\n  {shapes}; {size:.2f} MiB in memory\n"
    f"  source: {entry.source}\n  licence: {entry.licence}"
  )
