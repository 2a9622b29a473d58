"""Test set-up: shape checks on every foliax function, and one compilation cache for all runs."""

import os
import pathlib
import shutil

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Small factorisations are far slower when OpenBLAS spreads them over busy cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from jaxtyping import install_import_hook

# PEP 484's tower: an int is accepted where a float is asked for, as static type checkers do.
install_import_hook("foliax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


def _missing(marker: str) -> str | None:
  """Why tests with `marker` cannot run here; None when they can."""
  from foliax.training.preflight import missing_compiler

  if marker == "preflight":
    return missing_compiler("v5e-1")
  if marker == "preflight_gpu":
    return missing_compiler("h200")
  if marker == "browser" and not (shutil.which("chromium") or shutil.which("google-chrome")):
    return "no chromium on PATH"
  return None


def pytest_runtest_setup(item):
  """Skips what cannot run here, unless FOLIAX_MUST_RUN says that it must: CI sets it."""
  for marker in ("preflight", "preflight_gpu", "browser"):
    if item.get_closest_marker(marker) and (why := _missing(marker)):
      if marker in os.environ.get("FOLIAX_MUST_RUN", "").split():
        pytest.fail(f"{marker} tests must run here, but: {why}")
      pytest.skip(why)
