"""The loss in chunks is the loss of all logits at once, and so is its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foliax.language import loss, model

CONFIG = model.Config(
  vocab_size=17, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn_size=8
)
PARAMS = model.init(jax.random.key(0), CONFIG)
TOKENS = jax.random.randint(jax.random.key(1), (2, 13), 0, 17)
MASK = jnp.arange(12) % 3 > jnp.array([[0], [5]])


def plain(params):
  logits, _ = model.forward(params, CONFIG, TOKENS[:, :-1])
  nll = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
  return jnp.where(MASK, nll, 0.0).sum()


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.value_and_grad, has_aux=True)
def chunked(params, chunk):
  total, count = loss.next_token_loss(
    params, CONFIG, TOKENS[:, :-1], TOKENS[:, 1:], MASK, chunk=chunk
  )
  return total, count


@pytest.mark.parametrize("chunk", [5, 100])
def test_loss_and_gradient_do_not_depend_on_the_chunk(chunk):
  (total, count), gradient = chunked(PARAMS, chunk)
  expected, expected_gradient = jax.jit(jax.value_and_grad(plain))(PARAMS)
  np.testing.assert_allclose(total, expected, rtol=1e-6)
  assert count == MASK.sum()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected_gradient
  )


def test_no_buffer_holds_the_logits_of_a_row():
  t, chunk, vocabulary = 64, 8, 50_000
  config = model.Config(
    vocab_size=vocabulary, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn_size=8
  )
  tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
  gradient = jax.grad(
    lambda params, tokens: loss.next_token_loss(params, config, tokens, tokens, chunk=chunk)[0]
  )
  text = jax.jit(gradient).lower(model.shapes(config), tokens).as_text()
  assert f"tensor<1x{chunk}x{vocabulary}xf32>" in text
  assert f"{t}x{vocabulary}xf32" not in text


def test_chunk_of_nothing_is_refused():
  with pytest.raises(ValueError, match="chunk is 0"):
    loss.token_losses(PARAMS, CONFIG, jnp.zeros((1, 4, 8)), jnp.zeros((1, 4), jnp.int32), chunk=0)
