"""Next-token loss that never holds the logits of all tokens at once.

With a vocabulary of 150 thousand the logits of one row of 4096 tokens take 2.5 GB in float32. So
the tokens go in chunks, and the backward pass computes the logits of each chunk again.
"""

import jax
import jax.numpy as jnp
from foliax.language import model
from foliax.training.sharding import constrain
from jaxtyping import Array, Bool, Float, Int


def next_token_loss(
  params: model.Params,
  config: model.Config,
  tokens: Int[Array, "b t"],
  targets: Int[Array, "b t"],
  mask: Bool[Array, "b t"] | None = None,
  *,
  segment_ids: Int[Array, "b t"] | None = None,
  chunk: int = 512,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Sum of the negative log-probabilities of the targets, and how many counted.

  Args:
    params: parameters of the decoder.
    config: its static description.
    tokens: token ids.
    targets: the token that follows each.
    mask: which targets count; all when None.
    segment_ids: as for `foliax.language.model.forward`.
    chunk: tokens of a row whose logits are held at once; the largest divisor of `t` up to it.
  Returns:
    Sum in nats and count, both float32; their quotient is the loss.
  """
  hidden = model.hidden_states(params, config, tokens, segment_ids=segment_ids)
  nll = token_losses(params, config, hidden, targets, chunk=chunk)
  if mask is None:
    return nll.sum(), jnp.float32(nll.size)
  return jnp.where(mask, nll, 0.0).sum(), mask.sum(dtype=jnp.float32)


def token_losses(
  params: model.Params,
  config: model.Config,
  hidden: Float[Array, "b t d"],
  targets: Int[Array, "b t"],
  *,
  chunk: int = 512,
) -> Float[Array, "b t"]:
  """Negative log-probability in nats of each target, from hidden states after the last norm."""
  b, t, _ = hidden.shape
  if chunk < 1:
    raise ValueError(f"chunk is {chunk}; it must be at least 1")
  chunk = next(c for c in range(min(chunk, t), 0, -1) if t % c == 0)
  name = "embedding" if config.tied else "head"
  # Gathered over `data` once, not again for every chunk.
  params = params | {name: constrain(params[name], "model", None)}

  @jax.checkpoint
  def losses(_, inputs):
    hidden, targets = inputs
    logits = constrain(model.unembed(params, config, hidden), "data", None, "model")
    # A sum that picks one logit stays within each part of a split vocabulary; a gather does not.
    picked = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logit = jnp.where(picked, logits, 0.0).sum(-1)
    return None, jax.nn.logsumexp(logits, -1) - target_logit

  def split(x):
    return jnp.moveaxis(x.reshape(b, t // chunk, chunk, *x.shape[2:]), 1, 0)

  _, nll = jax.lax.scan(losses, None, (split(hidden), split(targets)))
  return jnp.moveaxis(nll, 0, 1).reshape(b, t)
