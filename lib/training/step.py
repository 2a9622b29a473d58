"""One step of training: a gradient, an optimiser, and a guard against what is not finite.

`update = gradient_step(loss, optimizer)` is a pure function `(state, batch) -> (state, metrics)`.
`jax.jit(update)` in a loop of one's own is all it takes to train; `foliax.training.loop.fit` adds
checkpoints, metrics and the rest. A method with another kind of update writes its own and uses
`non_finite` and `hold`, or leaves the guard to `fit`.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, Key


class TrainState(NamedTuple):
  """What `gradient_step` carries from step to step.

  Attributes:
    params: what is trained, any pytree.
    opt_state: state of the optimiser.
    step: number of steps done, skipped ones included.
    key: random key; step i uses `fold_in(key, i)`.
    skipped: number of steps skipped because something was not finite.
  """

  params: Any
  opt_state: Any
  step: Int[Array, ""]
  key: Key[Array, ""]
  skipped: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NonFinite:
  """Which of the tensors that were looked at is not finite.

  Attributes:
    index: int32, of the first such tensor in `names`; -1 when all are finite.
    names: paths of the tensors, e.g. `"gradient/layers/query"`.
  """

  index: Any
  names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def init(params: Any, optimizer: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
  """State before the first step.

  Args:
    params: what is trained.
    optimizer: any optax optimiser, the one given to `gradient_step`.
    key: source of the randomness of all steps, e.g. for dropout.
  """
  zero = lambda: jnp.zeros((), jnp.int32)  # each its own buffer, for both may be donated
  return TrainState(params, optimizer.init(params), zero(), key, zero())


def gradient_step(
  loss: Callable[[Any, Any, Key[Array, ""]], tuple[Any, dict[str, Any]]],
  optimizer: optax.GradientTransformation,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
  """Makes the update that goes down the gradient of a loss.

  A step whose loss, gradient or resulting change of the parameters has an element that is not
  finite is skipped: parameters and optimiser keep their state, the step is counted.

  Args:
    loss: `(params, batch, key) -> (scalar, metrics)`, where metrics is a dict of further scalars.
    optimizer: any optax optimiser, also one that looks at the value of the loss (L-BFGS, Polyak).
  Returns:
    `update(state, batch) -> (state, metrics)`. Metrics are those of the loss and `loss`,
    `gradient_norm` and `non_finite` (a `NonFinite`).
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
    key = jax.random.fold_in(state.key, state.step)
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, batch, key)
    change, opt_state = optimizer.update(
      gradient,
      state.opt_state,
      state.params,
      value=value,
      grad=gradient,
      value_fn=lambda params: loss(params, batch, key)[0],
    )
    found = non_finite(OrderedDict(loss=value, gradient=gradient, update=change))
    ok = found.index < 0
    params = optax.apply_updates(state.params, change)
    params, opt_state = hold(ok, (params, opt_state), (state.params, state.opt_state))
    skipped = state.skipped + jnp.where(ok, 0, 1)
    norm = optax.tree.norm(gradient)
    metrics = {"loss": value, "gradient_norm": norm, **metrics, "non_finite": found}
    return TrainState(params, opt_state, state.step + 1, state.key, skipped), metrics

  return update


def non_finite(tree: Any) -> NonFinite:
  """Looks for the first tensor in which an element is infinite or not a number.

  Args:
    tree: pytree of arrays, in the order to look; an `OrderedDict` keeps the order of its items,
      a dict sorts them. Leaves that are not floats are passed over.
  """
  leaves = [
    (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  ]
  if not leaves:
    return NonFinite(jnp.int32(-1), ())
  bad = jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in leaves])
  index = jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int32)
  return NonFinite(index, tuple(name for name, _ in leaves))


def hold(ok: Bool[Array, ""], new: Any, old: Any) -> Any:
  """`new` where ok, else `old`; pytrees of the same form."""
  return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
