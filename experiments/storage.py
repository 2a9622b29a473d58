"""JSON of a run on disk: what `foliax.training.storage` does, and flat names for its fields."""

from typing import Any

from foliax.training.storage import (
  read_sealed,
  round_trip,
  to_json,
  write_atomically,
  write_sealed,
)

__all__ = [
  "flatten",
  "read_sealed",
  "round_trip",
  "to_json",
  "write_atomically",
  "write_sealed",
]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dictionaries as one, with dotted names."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat
