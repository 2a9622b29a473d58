"""The experiments that foliax knows by name, imported only when asked for."""

import difflib
import importlib
import types
from collections.abc import Iterable


class UserError(ValueError):
  """Something that whoever typed the command can put right; shown as one line, exit code 2."""


EXPERIMENTS: dict[str, str] = {
  "cgp": "foliax.experiments.cgp",
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
  if method in EXPERIMENTS:
    return importlib.import_module(EXPERIMENTS[method])
  if "." not in method:
    raise UserError(f"unknown method {method!r}; {nearest(method, EXPERIMENTS)}")
  try:
    module = importlib.import_module(method)
  except ModuleNotFoundError as error:
    if error.name and (method == error.name or method.startswith(error.name + ".")):
      raise UserError(f"no module named {method!r}; is it on PYTHONPATH?") from None
    raise
  missing = [f for f in ("get_config", "run", "claims", "figures") if not hasattr(module, f)]
  if missing:
    raise UserError(f"module {method!r} is no experiment: it lacks {', '.join(missing)}")
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
