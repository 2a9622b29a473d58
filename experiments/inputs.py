"""Real inputs of the experiments: what they are, where they come from, and whether they load."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from foliax import extras
from foliax.experiments import registry
from foliax.experiments.registry import UserError
from foliax.language import pretrained


class Input(NamedTuple):
  """A data set; models are in `foliax.language.pretrained.MODELS`.

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
  """Loads inputs and describes them; models are downloaded first if they are not there yet.

  Args:
    names: keys of `INPUTS` and of `pretrained.MODELS`; all of `INPUTS` when empty.
  Returns:
    One paragraph per input: name, shapes, size, source, licence.
  Raises:
    UserError: a name is unknown, or an input is not what it should be or cannot be had.
    ModuleNotFoundError: the package that brings it is missing; the message names the extra.
  """
  known = [*INPUTS, *pretrained.MODELS]
  for name in names:
    if name not in known:
      raise UserError(f"unknown input {name!r}; {registry.nearest(name, known)}")
  return [
    _describe(name, INPUTS[name]) if name in INPUTS else _describe_model(name)
    for name in names or INPUTS
  ]


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


def _describe_model(name: str) -> str:
  import jax
  from foliax.language import weights

  entry = pretrained.MODELS[name]
  try:
    path = pretrained.fetch(name)
    params = weights.load(path)[0] if path.is_file() else weights.load_encoder(path).params
  except (OSError, RuntimeError, ValueError) as error:
    raise UserError(str(error)) from None
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  size = sum(file.size for file in entry.files.values()) / 2**20
  return (
    f"{name}: {entry.description}\n  {count:,} parameters, {size:.2f} MiB in {path}\n"
    f"  source: {entry.source}\n  licence: {entry.licence}"
  )
