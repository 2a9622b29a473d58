"""The sentence encoder: against a plain form, and independent of padding and company."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from foliax.language import encoder, weights

CONFIG = encoder.Config(
  vocab_size=40, hidden_size=16, layers=2, heads=4, ffn_size=24, context=32, norm_eps=1e-5
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(chr(97 + i) for i in range(26))]
TENSORS = {
  "tokens": "embeddings.word_embeddings",
  "positions": "embeddings.position_embeddings",
  "types": "embeddings.token_type_embeddings",
  "norm": "embeddings.LayerNorm",
  "query": "attention.self.query",
  "key": "attention.self.key",
  "value": "attention.self.value",
  "output": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "up": "intermediate.dense",
  "down": "output.dense",
  "ffn_norm": "output.LayerNorm",
}
embed = jax.jit(encoder.embed, static_argnums=1)


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  draw = lambda struct: jnp.asarray(0.5 * rng.normal(size=struct.shape), jnp.float32)
  return jax.tree.map(draw, encoder.shapes(CONFIG))


@pytest.fixture
def directory(params, tmp_path):
  """The encoder as a directory of BERT."""
  tensors = {"embeddings.position_ids": np.arange(32), "pooler.dense.weight": np.ones((16, 16))}
  for name, value in params.items():
    if name != "layers":
      suffix = "bias" if name.endswith("bias") else "weight"
      tensors[f"{TENSORS[name.removesuffix('_bias')]}.{suffix}"] = np.asarray(value)
  for name, stacked in params["layers"].items():
    suffix = "bias" if name.endswith("bias") else "weight"
    for i, value in enumerate(stacked):
      tensor = f"encoder.layer.{i}.{TENSORS[name.removesuffix('_bias')]}.{suffix}"
      tensors[tensor] = np.ascontiguousarray(np.asarray(value).T)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  config = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
  tokenizer.enable_padding(length=30)  # must not count: released files have such settings
  tokenizer.enable_truncation(5)
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def plain(params, tokens):
  """One text through loops over layers and heads, in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale + bias

  x = p["tokens"][tokens] + p["positions"][: len(tokens)] + p["types"][0]
  x = norm(x, p["norm"], p["norm_bias"])
  for i in range(CONFIG.layers):
    w = {name: value[i] for name, value in p["layers"].items()}
    mixed = []
    for head in range(4):
      part = slice(4 * head, 4 * head + 4)
      q, k, v = (x @ w[n][:, part] + w[f"{n}_bias"][part] for n in ("query", "key", "value"))
      scores = np.exp(q @ k.T / 2.0)
      mixed.append(scores / scores.sum(-1, keepdims=True) @ v)
    y = np.concatenate(mixed, -1) @ w["output"] + w["output_bias"]
    x = norm(x + y, w["attention_norm"], w["attention_norm_bias"])
    y = x @ w["up"] + w["up_bias"]
    y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
    x = norm(x + y @ w["down"] + w["down_bias"], w["ffn_norm"], w["ffn_norm_bias"])
  mean = x.mean(0)
  return mean / np.linalg.norm(mean)


def test_vectors_are_those_of_the_plain_form(params):
  tokens = np.random.default_rng(1).integers(40, size=(3, 9)).astype(np.int32)
  vectors = embed(params, CONFIG, tokens, np.ones((3, 9), bool))
  for row, vector in zip(tokens, vectors, strict=True):
    np.testing.assert_allclose(vector, plain(params, row), atol=2e-5)


def test_padding_changes_nothing(params):
  tokens = np.random.default_rng(1).integers(40, size=(2, 9)).astype(np.int32)
  mask = np.arange(9) < np.array([[9], [4]])
  short = embed(params, CONFIG, tokens, mask)
  np.testing.assert_allclose(short[1], plain(params, tokens[1, :4]), atol=2e-5)
  other = embed(params, CONFIG, np.where(mask, tokens, 7), mask)
  np.testing.assert_array_equal(short, other)
  nothing = embed(params, CONFIG, tokens, np.array([[True] * 9, [False] * 9]))
  np.testing.assert_array_equal(nothing[0], short[0])


def test_texts_are_embedded_one_by_one_or_together(params, directory):
  encode = weights.load_encoder(directory)
  assert encode.config == CONFIG
  assert encode.max_tokens == 12
  texts = ["a b", "", "c d e f g h", "z " * 100, "unknown", "b"]
  together = encode(texts)
  assert together.shape == (6, 16)
  np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
  encode.batch_size = 2
  np.testing.assert_allclose(encode(texts), together, atol=1e-5)
  np.testing.assert_allclose(together[0], plain(params, [2, 4, 5, 3]), atol=2e-5)
  np.testing.assert_allclose(together[1], plain(params, [2, 3]), atol=2e-5)
  np.testing.assert_allclose(together[3], plain(params, [2, *[29] * 10, 3]), atol=2e-5)
  assert encode([]).shape == (0, 16)
  with pytest.raises(ValueError, match="texts is one string"):
    encode("a b")


def test_bfloat16_is_close(params, directory):
  half = weights.load_encoder(directory, jnp.bfloat16)
  full = weights.load_encoder(directory)
  assert (half(["a b c"]) * full(["a b c"])).sum() > 0.99


@pytest.mark.parametrize(
  ("file", "change", "message"),
  [
    ("config.json", {"model_type": "roberta"}, "model_type is 'roberta'; allowed: bert"),
    ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: gelu"),
    ("config.json", {"num_attention_heads": 3}, "heads 3 does not divide"),
    ("config.json", {"vocab_size": 41}, r"word_embeddings.weight has shape \[40, 16\].*\[41, 16\]"),
    (
      "config.json",
      {"num_hidden_layers": 3},
      r"tensor encoder\.layer\.2\..* is missing",
    ),
    ("config.json", {"num_hidden_layers": 1}, "'encoder.layer.1.*' is unexpected"),
    ("config.json", {"num_hidden_layers": 2**30}, "has 1073741824 layers, and there are only"),
    ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length is -1"),
    ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token is true"),
    ("tokenizer.json", {"model": {"type": "none"}}, "cannot be read"),
  ],
)
def test_what_is_wrong_with_an_encoder_is_said(file, change, message, directory):
  path = directory / file
  path.parent.mkdir(exist_ok=True)
  before = json.loads(path.read_text()) if path.is_file() else {}
  path.write_text(json.dumps(before | change))
  with pytest.raises(ValueError, match=message) as caught:
    weights.load_encoder(directory)
  assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(params, directory):
  small = dataclasses.replace(CONFIG, vocab_size=20)
  with pytest.raises(ValueError, match="has 30 tokens, and the model 20"):
    encoder.SentenceEncoder(params, small, directory / "tokenizer.json")
  with pytest.raises(ValueError, match="max_tokens is 33; allowed: 2 to the context, 32"):
    encoder.SentenceEncoder(params, CONFIG, directory / "tokenizer.json", max_tokens=33)
  with pytest.raises(ValueError, match="batch_size is 0"):
    encoder.SentenceEncoder(params, CONFIG, directory / "tokenizer.json", batch_size=0)
  with pytest.raises(ValueError, match="tokens has 33 a row"):
    embed(params, CONFIG, np.zeros((1, 33), np.int32), np.ones((1, 33), bool))
