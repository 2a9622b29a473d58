"""The decoder: equal ways of computing the same thing, and what bad configurations say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.language import lora, model
from jax.test_util import check_grads

CONFIG = model.Config(
  vocab_size=61, hidden_size=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=40, context=64
)
FAMILIES = {
  "llama": CONFIG,
  "llama 3": dataclasses.replace(
    CONFIG, tied=False, rope_scaling=model.RopeScaling(8.0, 1.0, 4.0, 32)
  ),
  "qwen2": dataclasses.replace(CONFIG, qkv_bias=True, rope_theta=1e6),
  "qwen3": dataclasses.replace(CONFIG, qk_norm=True, tied=False),
  "sliding window": dataclasses.replace(CONFIG, sliding_window=5),
}
forward = jax.jit(model.forward, static_argnums=1)
forward_cached = jax.jit(model.forward_cached, static_argnums=1)
TOKENS = jax.random.randint(jax.random.key(1), (3, 16), 0, CONFIG.vocab_size)


@functools.cache
def params_of(config):
  """Parameters away from their initial values, so that norms and biases matter."""
  params = model.init(jax.random.key(0), config)
  leaves, treedef = jax.tree.flatten(params)
  noisy = [
    x + 0.2 * jax.random.normal(jax.random.fold_in(jax.random.key(7), i), x.shape)
    for i, x in enumerate(leaves)
  ]
  return treedef.unflatten(noisy)


def reference(params, config, tokens):
  """One row, one layer, one head, one query at a time, in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  h, group = config.head_dim, config.heads // config.kv_heads

  def norm(x, w):
    return x / np.sqrt((x * x).mean() + config.rms_eps) * w

  def rotate(x, position):
    out = np.empty(h)
    for i in range(h // 2):
      frequency = config.rope_theta ** (-2 * i / h)
      if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        wavelength = 2 * np.pi / frequency
        if wavelength > original / low:
          frequency /= factor
        elif wavelength >= original / high:
          smooth = (original / wavelength - low) / (high - low)
          frequency *= (1 - smooth) / factor + smooth
      a, c, s = position * frequency, x[i], x[i + h // 2]
      out[i], out[i + h // 2] = c * np.cos(a) - s * np.sin(a), s * np.cos(a) + c * np.sin(a)
    return out

  xs = [p["embedding"][t] for t in tokens]
  for layer in range(config.layers):
    w = {name: value[layer] for name, value in p["layers"].items()}
    queries, keys, values = [], [], []
    for position, x in enumerate(xs):
      y = norm(x, w["attention_norm"])
      q, k, v = (y @ w[n] + w.get(f"{n}_bias", 0.0) for n in ("query", "key", "value"))
      q, k, v = q.reshape(-1, h), k.reshape(-1, h), v.reshape(-1, h)
      if config.qk_norm:
        q = np.stack([norm(head, w["query_norm"]) for head in q])
        k = np.stack([norm(head, w["key_norm"]) for head in k])
      queries.append([rotate(head, position) for head in q])
      keys.append([rotate(head, position) for head in k])
      values.append(v)
    for t, x in enumerate(xs):
      first = 0 if config.sliding_window is None else max(0, t - config.sliding_window + 1)
      heads = []
      for n in range(config.heads):
        scores = np.array([queries[t][n] @ keys[s][n // group] for s in range(first, t + 1)])
        weights = np.exp(scores / np.sqrt(h))
        weights /= weights.sum()
        seen = range(first, t + 1)
        heads.append(sum(a * values[s][n // group] for a, s in zip(weights, seen, strict=True)))
      x = x + np.concatenate(heads) @ w["output"]
      y = norm(x, w["ffn_norm"])
      gate = y @ w["gate"]
      xs[t] = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
  head = p["embedding"] if config.tied else p["head"]
  return np.stack([head @ norm(x, p["final_norm"]) for x in xs])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_slow_reference(family):
  config = FAMILIES[family]
  logits, _ = forward(params_of(config), config, TOKENS)
  for row in range(2):
    expected = reference(params_of(config), config, np.asarray(TOKENS[row]))
    np.testing.assert_allclose(logits[row], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
  ("family", "layout"),
  [
    *((family, "stacked") for family in FAMILIES),
    ("qwen2", "for decoding"),
    ("sliding window", "for decoding"),
  ],
)
def test_cached_is_uncached_however_the_row_is_cut(family, layout):
  config, params = FAMILIES[family], params_of(FAMILIES[family])
  expected, expected_hidden = forward(params, config, TOKENS)
  if layout == "for decoding":
    params = model.for_decoding(params)
  cache = model.init_cache(params, config, 3, 20)
  pieces = []
  for start in range(0, 16, 4):
    logits, hidden, cache = forward_cached(params, config, TOKENS[:, start : start + 4], cache)
    np.testing.assert_allclose(hidden, expected_hidden[:, start : start + 4], atol=1e-4)
    pieces.append(logits)
  np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-4)
  assert cache.lengths.tolist() == [16, 16, 16]


def test_ragged_rows_are_each_as_if_alone():
  params = params_of(CONFIG)
  expected, _ = forward(params, CONFIG, TOKENS)
  counts = jnp.array([4, 1, 0])
  _, _, cache = forward_cached(
    params, CONFIG, TOKENS[:, :4], model.init_cache(params, CONFIG, 3, 20), counts
  )
  assert cache.lengths.tolist() == [4, 1, 0]
  following = jnp.stack([TOKENS[0, 4:8], TOKENS[1, 1:5], TOKENS[2, 0:4]])
  logits, _, cache = forward_cached(params, CONFIG, following, cache)
  np.testing.assert_allclose(logits[0], expected[0, 4:8], atol=1e-4)
  np.testing.assert_allclose(logits[1], expected[1, 1:5], atol=1e-4)
  np.testing.assert_allclose(logits[2], expected[2, 0:4], atol=1e-4)


@pytest.mark.parametrize("forgotten", [1, 3, 8])
def test_after_a_rollback_nothing_of_what_was_forgotten_is_left(forgotten):
  params = params_of(CONFIG)
  cache = model.init_cache(params, CONFIG, 3, 20)
  _, _, cache = forward_cached(params, CONFIG, TOKENS[:, :4], cache)
  _, _, direct = forward_cached(params, CONFIG, TOKENS[:, 4:8], cache)
  wrong = (TOKENS + 1) % CONFIG.vocab_size
  astray = direct
  for start in (0, 4):
    _, _, astray = forward_cached(params, CONFIG, wrong[:, start : start + 4], astray)
  back = model.rollback(astray, astray.lengths - 8)  # to where `direct` was
  back = model.rollback(back, back.lengths - forgotten)
  start = 8 - forgotten
  again = jnp.stack([jnp.roll(TOKENS, -start, 1)[row, :forgotten] for row in range(3)])
  padded = jnp.pad(again, ((0, 0), (0, 8 - forgotten)))
  _, _, back = forward_cached(params, CONFIG, padded, back, jnp.full(3, forgotten))
  assert back.lengths.tolist() == direct.lengths.tolist()
  a, _, _ = forward_cached(params, CONFIG, TOKENS[:, 8:12], direct)
  b, _, _ = forward_cached(params, CONFIG, TOKENS[:, 8:12], back)
  np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_layout_for_decoding_changes_nothing_without_a_cache_either():
  for config in (CONFIG, FAMILIES["qwen2"]):
    params = params_of(config)
    expected, _ = forward(params, config, TOKENS)
    logits, _ = forward(model.for_decoding(params), config, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_rollback_to_a_longer_length_changes_nothing():
  cache = model.init_cache(params_of(CONFIG), CONFIG, 3, 20)
  cache = cache._replace(lengths=jnp.array([3, 0, 7]))
  assert model.rollback(cache, jnp.array([5, 5, 5])).lengths.tolist() == [3, 0, 5]


def test_tokens_beyond_the_capacity_are_dropped_and_overwrite_nothing():
  params = params_of(CONFIG)
  _, _, full = forward_cached(params, CONFIG, TOKENS[:, :4], model.init_cache(params, CONFIG, 3, 4))
  _, _, over = forward_cached(params, CONFIG, TOKENS[:, 4:8], full)
  np.testing.assert_array_equal(over.keys, full.keys)
  np.testing.assert_array_equal(over.values, full.values)


def test_packed_documents_are_each_as_if_alone():
  params = params_of(CONFIG)
  segments = jnp.array([[1] * 6 + [2] * 7 + [0] * 3] * 3)
  packed, _ = forward(params, CONFIG, TOKENS, None, segments)
  assert bool(jnp.isfinite(packed).all())
  for start, stop in ((0, 6), (6, 13)):
    row = jnp.pad(TOKENS[:, start:stop], ((0, 0), (0, 16 - stop + start)))
    alone, _ = forward(params, CONFIG, row)
    np.testing.assert_allclose(packed[:, start:stop], alone[:, : stop - start], atol=1e-4)


def test_only_distances_between_positions_matter():
  params = params_of(CONFIG)
  positions = jnp.broadcast_to(jnp.arange(16), TOKENS.shape)
  here, _ = forward(params, CONFIG, TOKENS, positions)
  there, _ = forward(params, CONFIG, TOKENS, positions + 37)
  np.testing.assert_allclose(here, there, atol=1e-3)


def test_grouped_queries_are_repeated_key_value_heads():
  params = params_of(CONFIG)
  layers = dict(params["layers"])
  for name in ("key", "value"):
    split = layers[name].reshape(2, 24, 2, 1, 8)
    layers[name] = jnp.broadcast_to(split, (2, 24, 2, 2, 8)).reshape(2, 24, 32)
  wide = dataclasses.replace(CONFIG, kv_heads=4)
  grouped, _ = forward(params, CONFIG, TOKENS)
  repeated, _ = forward(params | {"layers": layers}, wide, TOKENS)
  np.testing.assert_allclose(grouped, repeated, atol=1e-4)


def test_blocks_of_queries_change_nothing(monkeypatch):
  params = params_of(FAMILIES["sliding window"])
  segments = jnp.array([[1] * 9 + [2] * 7] * 3)
  arguments = (params, FAMILIES["sliding window"], TOKENS, None, segments)
  whole, _ = model.forward(*arguments)
  monkeypatch.setattr(model, "_QUERY_BLOCK", 4)
  blocks, _ = model.forward(*arguments)
  np.testing.assert_allclose(whole, blocks, atol=1e-5)


def loss(params, config):
  logits, _ = model.forward(params, config, TOKENS)
  return -jax.nn.log_softmax(logits)[:, :-1, 0].mean()


def test_gradients_are_those_of_finite_differences():
  jitted = jax.jit(lambda p: loss(p, CONFIG))
  check_grads(jitted, (params_of(CONFIG),), order=1, modes=["rev"], eps=3e-3, rtol=0.02)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
  params = params_of(CONFIG)
  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  kept = gradient(params, CONFIG)
  again = gradient(params, dataclasses.replace(CONFIG, remat=remat))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, again)


def test_jit_changes_nothing_and_vmap_over_parameters_is_a_loop():
  several = [params_of(CONFIG), model.init(jax.random.key(5), CONFIG)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *several)
  together = jax.jit(jax.vmap(lambda p: model.forward(p, CONFIG, TOKENS)[0]))(stacked)
  for params, logits in zip(several, together, strict=True):
    np.testing.assert_allclose(model.forward(params, CONFIG, TOKENS)[0], logits, atol=1e-4)


def test_bfloat16_is_near_float32_and_its_logits_are_float32():
  params = model.init(jax.random.key(0), CONFIG)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  exact, _ = forward(params, CONFIG, TOKENS)
  logits, hidden = forward(half, CONFIG, TOKENS)
  assert logits.dtype == jnp.float32
  assert hidden.dtype == jnp.bfloat16
  np.testing.assert_allclose(logits, exact, atol=0.03)
  cache = model.init_cache(half, CONFIG, 3, 20)
  cached, _, _ = forward_cached(half, CONFIG, TOKENS[:, :4], cache)
  np.testing.assert_allclose(cached, exact[:, :4], atol=0.03)


def test_init_has_the_shapes_it_promises():
  for config in FAMILIES.values():
    promised = jax.tree.map(lambda x: (x.shape, x.dtype), model.shapes(config))
    params = model.init(jax.random.key(0), config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == promised


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"heads": 5}, "heads is 5, which kv_heads 2 does not divide"),
    ({"head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
    ({"layers": 0}, "layers is 0; it must be at least 1"),
    ({"sliding_window": 0}, "sliding_window is 0; use None or at least 1"),
    ({"remat": "all"}, "remat is 'all'; allowed: none, dots, full"),
  ],
)
def test_an_impossible_configuration_says_what_is_wrong(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)


def trained(adapters):
  return jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), adapters
  )


def test_fresh_adapters_change_nothing():
  params = params_of(CONFIG)
  adapted = lora.apply(params, lora.init(jax.random.key(2), params, rank=3))
  before, _ = forward(params, CONFIG, TOKENS)
  after, _ = forward(adapted, CONFIG, TOKENS)
  np.testing.assert_allclose(before, after, atol=1e-5)


def test_merged_parameters_are_the_adapted_model():
  params = params_of(CONFIG)
  adapters = trained(lora.init(jax.random.key(2), params, rank=3))
  merged, _ = forward(lora.merge(params, adapters, 8.0), CONFIG, TOKENS)
  adapted, _ = forward(lora.apply(params, adapters, 8.0), CONFIG, TOKENS)
  before, _ = forward(params, CONFIG, TOKENS)
  np.testing.assert_allclose(merged, adapted, atol=1e-3)
  assert float(jnp.abs(adapted - before).max()) > 0.1


def test_every_adapter_receives_a_gradient():
  params = params_of(CONFIG)
  adapters = trained(lora.init(jax.random.key(2), params, rank=2))
  gradient = jax.jit(jax.grad(lambda a: loss(lora.apply(params, a), CONFIG)))(adapters)
  for name in lora.MATRICES:
    assert all(float(jnp.abs(g).max()) > 0 for g in gradient[name].values()), name


def test_adapters_of_unknown_weights_or_no_width_are_refused():
  params = params_of(CONFIG)
  with pytest.raises(ValueError, match=r"targets has \['head'\]; allowed: query"):
    lora.init(jax.random.key(0), params, targets=("head",))
  with pytest.raises(ValueError, match="rank is 0"):
    lora.init(jax.random.key(0), params, rank=0)
