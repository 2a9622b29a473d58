"""The experiments and training jobs that foliax knows by name, imported only when asked for."""

import difflib
import importlib
import types
from collections.abc import Iterable


class UserError(ValueError):
  """Something that whoever typed the command can put right; shown as one line, exit code 2."""


EXPERIMENTS: dict[str, str] = {
  "cgp": "foliax.experiments.cgp",
  "language": "foliax.experiments.language",
}
# Training jobs make a model, and have no claims to decide.
JOBS: dict[str, str] = {
  "decoder": "foliax.experiments.decoder",
}
SCALES = ("smoke", "laptop", "pod")


def load(method: str) -> types.ModuleType:
  """Imports an experiment.

  Args:
    method: a name in `EXPERIMENTS`, or the dotted path of any importable module with the same
      functions (`get_config`, `run`, `claims`, `figures`), e.g. `my_project.my_experiment`.
  Returns:
    The module.
  Raises:
    UserError: there is no such experiment.
  """
  needed = ("get_config", "run", "claims", "figures")
  return _load(method, EXPERIMENTS, "method", "experiment", needed)


def load_job(job: str) -> types.ModuleType:
  """Imports a training job.

  Args:
    job: a name in `JOBS`, or the dotted path of any importable module with `get_config` and
      `train`.
  Returns:
    The module.
  Raises:
    UserError: there is no such job.
  """
  return _load(job, JOBS, "job", "training job", ("TITLE", "get_config", "train"))


def _load(
  name: str, known: dict[str, str], noun: str, kind: str, functions: tuple[str, ...]
) -> types.ModuleType:
  if name in known:
    return importlib.import_module(known[name])
  if "." not in name:
    raise UserError(f"unknown {noun} {name!r}; {nearest(name, known)}")
  try:
    module = importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name and (name == error.name or name.startswith(error.name + ".")):
      raise UserError(f"no module named {name!r}; is it on PYTHONPATH?") from None
    raise
  missing = [f for f in functions if not hasattr(module, f)]
  if missing:
    raise UserError(f"module {name!r} is no {kind}: it lacks {', '.join(missing)}")
  return module


def split(target: str) -> tuple[str, str]:
  """Splits `method:scale`.

  Raises:
    UserError: no scale was given, or it is not one of `SCALES`.
  """
  method, _, scale = target.partition(":")
  if scale not in SCALES:
    named = f"unknown scale {scale!r}" if scale else f"no scale in {target!r}"
    raise UserError(
      f"{named}; write {method or 'METHOD'}:SCALE with SCALE one of {', '.join(SCALES)}"
    )
  return method, scale


def nearest(name: str, known: Iterable[str]) -> str:
  """What to suggest for an unknown name: the nearest known ones, or all of them."""
  known = sorted(known)
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}"
