"""Checkpoints of transformers give its logits here, and those written here give ours there."""

import json
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.experiments import peers
from foliax.language import model, pretrained, weights

pytestmark = [pytest.mark.peers, pytest.mark.slow]

FAMILIES = ("llama", "llama-3", "mistral", "qwen2", "qwen2-window", "qwen3", "qwen3-tied")
TOKENS = np.random.default_rng(0).integers(97, size=(2, 24))
forward = jax.jit(model.forward, static_argnums=1)


def reference(*arguments):
  """Runs the reference in the peers environment."""
  python = peers.peers_python()
  if python is None:
    pytest.skip("no peers environment: set FOLIAX_PEERS_PYTHON or make .venv-peers")
  script = pathlib.Path(__file__).with_name("transformers_reference.py")
  done = subprocess.run(
    [python, script, *map(str, arguments)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  directory = tmp_path_factory.mktemp("written")
  reference("write", directory)
  return directory


@pytest.fixture(scope="module")
def read_back(written, tmp_path_factory):
  directory = tmp_path_factory.mktemp("saved")
  for family in FAMILIES:
    weights.save(directory / family, *weights.load(written / family), shard_bytes=40_000)
  reference("read", directory)
  return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformers_gives_its_logits(family, written):
  params, config = weights.load(written / family)
  logits, _ = forward(params, config, jnp.asarray(TOKENS))
  expected = np.load(written / f"{family}.npy")
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_written_here_gives_the_same_logits_in_transformers(
  family, written, read_back
):
  expected = np.load(written / f"{family}.npy")
  np.testing.assert_allclose(np.load(read_back / f"{family}.npy"), expected, atol=1e-4)


def test_minilm_gives_the_vectors_of_transformers(tmp_path):
  texts = [
    "A cat sleeps on the mat.",
    "",
    "naïve café — 東京 is Tokyo 🙂",
    "[CLS] is a token, [SEP] another; [MASK]",
    "1234567890 " * 60,
    "The stock fell by 3.5% on Tuesday,\nafter a profit warning.",
    "long " * 400,
  ]
  folder = pretrained.fetch("minilm")
  (tmp_path / "texts.json").write_text(json.dumps(texts))
  reference("embed", folder, tmp_path / "texts.json", tmp_path / "vectors.npy")
  expected = np.load(tmp_path / "vectors.npy")
  np.testing.assert_allclose(weights.load_encoder(folder)(texts), expected, atol=1e-4)
