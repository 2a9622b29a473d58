"""Pretrained models: where they come from, and the folder that keeps them."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
  """The folder that keeps models and conversions: `FOLIAX_CACHE`, or `~/.cache/foliax`."""
  named = os.environ.get("FOLIAX_CACHE")
  return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "foliax"
