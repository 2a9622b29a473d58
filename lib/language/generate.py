"""Batched generation with a key-value cache, and log-probabilities of what was generated.

What a row says depends on its prompt and its key alone, whatever other rows there are: token `i`
of it is drawn with `fold_in(key, i)`.

Two log-probabilities are recorded of each token. `log_probs` is the model's own, at temperature 1
over the whole vocabulary: what `score` computes again, and gradients are taken of.
`sample_log_probs` is that of the distribution drawn from, after temperature and filters: what
importance weights need.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from foliax.language import model
from foliax.language.decode import Callback, Generation, run
from foliax.language.loss import token_losses
from foliax.language.sampling import sampling
from foliax.language.tokenizer import StreamDecoder, Tokenizer
from jaxtyping import Array, Float, Int, Key

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


def generate(
  params: model.Params,
  config: model.Config,
  prompts: Int[Array, "b t"],
  lengths: Int[Array, " b"],
  keys: Key[Array, " r"],
  *,
  max_new_tokens: int,
  temperature: float | Float[Array, " r"] = 1.0,
  top_k: int | Int[Array, " r"] = 0,
  top_p: float | Float[Array, " r"] = 1.0,
  min_p: float | Float[Array, " r"] = 0.0,
  stop_ids: Sequence[int] = (),
  cache: model.Cache | None = None,
  callback: Callback | None = None,
  chunk: int = 8,
) -> Generation:
  """Continues each prompt, once for each of its keys.

  It can be called inside `jit` too, without a callback; values are then not checked, and memory
  is taken for prompts of `t` tokens.

  Args:
    params: parameters; see `foliax.language.model.for_decoding` on a CPU.
    config: static description of the model.
    prompts: token ids, padded on the right; see `pad` and `right_padded`.
    lengths: number of tokens of each prompt, at least 1.
    keys: a typed key for each row of the result: `r` is a multiple of `b`, and the first `r / b`
      rows continue the first prompt.
    max_new_tokens: tokens to draw of each row at most.
    temperature, top_k, top_p, min_p: as in `foliax.language.sampling.Sampling`, for all rows or
      one a row.
    stop_ids: tokens that end a row.
    cache: what came before the prompts, a row for each; it is consumed. Empty when None.
    callback: called every `chunk` tokens with the new tokens of each row; rows for which it
      returns True end there. It may return None.
    chunk: tokens between two calls of the callback.
  Raises:
    ValueError: for prompts that are empty, too long or out of the vocabulary, and options out of
      range.
  """
  rows = keys.shape[0]
  _check(config, prompts, lengths, rows, max_new_tokens, stop_ids, chunk)
  options = sampling(rows, temperature, top_k, top_p, min_p)
  if _known(prompts, lengths):
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    prompts = prompts[:, : lengths.max()]
  width = prompts.shape[1]
  used = int(np.max(cache.lengths)) if cache is not None and _known(cache.lengths) else 0
  _check_room(config, cache, used, width, max_new_tokens)
  return run(
    params, config, prompts, lengths, keys, options, max_new_tokens, stop_ids, callback,
    chunk, cache=cache,
  )  # fmt: skip


def score(
  params: model.Params,
  config: model.Config,
  tokens: Int[Array, "b t"],
  lengths: Int[Array, " b"],
) -> Float[Array, "b t"]:
  """Log-probability of each token after those before it, as `Generation.log_probs`.

  Pure and differentiable; the logits of a few hundred positions exist at a time.

  Args:
    params: parameters.
    config: static description of the model.
    tokens: token ids, padded on the right.
    lengths: number of tokens of each row.
  Returns:
    Log-probabilities in nats; 0 for the first token, which follows nothing, and for padding.
  """
  hidden = model.hidden_states(params, config, tokens)
  losses = token_losses(params, config, hidden, jnp.roll(tokens, -1, 1))
  order = jnp.arange(tokens.shape[1])
  return jnp.where((order > 0) & (order < lengths[:, None]), -jnp.roll(losses, 1, 1), 0.0)


def pad(rows: Sequence[Sequence[int]]) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
  """Token lists of different lengths as one array, padded on the right with 0, and the lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), max(lengths, default=0)), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  return jnp.asarray(tokens), jnp.asarray(lengths)


def right_padded(prompts: Int[Array, "b t"], lengths: Int[Array, " b"]) -> Int[Array, "b t"]:
  """Rows padded on the left, moved so that they are padded on the right."""
  t = prompts.shape[1]
  order = (jnp.arange(t) + t - lengths[:, None]) % t
  return jnp.take_along_axis(prompts, order, 1)


@dataclasses.dataclass(frozen=True)
class Completion:
  """One answer to a prompt.

  Attributes:
    text: without the stop token or stop string that ended it.
    tokens: the tokens drawn, with the stop token if one ended it. Where a stop string cuts the
      text, up to the last token that the text needs: decoded, they begin with `text`, and go
      beyond it only if the stop string begins inside a token. A remote model's may be texts.
    log_probs: as in `Generation`, one for each token.
    finish_reason: `"stop"` for a stop token or string, `"length"`, or `"error"` where the model's
      logits were not finite.
    sample_log_probs: as in `Generation`, one for each token; empty from a remote model.
  """

  text: str
  tokens: list[int] | list[str]
  log_probs: list[float]
  finish_reason: str
  sample_log_probs: list[float] = dataclasses.field(default_factory=list)


class Generator:
  """A model with its tokenizer: texts or messages in, completions out."""

  def __init__(
    self, params: model.Params, config: model.Config, tokenizer: Tokenizer, batch_size: int = 32
  ):
    """Lays plain parameters that are on the CPU out for decoding, which copies them.

    Args:
      params: parameters of the decoder.
      config: their static description.
      tokenizer: turns prompts into tokens and back.
      batch_size: number of completions generated at the same time, or `n` where that is more.
    Raises:
      ValueError: the tokenizer has tokens that the model does not know.
    """
    if batch_size < 1:
      raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if tokenizer.vocab_size > config.vocab_size:
      raise ValueError(
        f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}; use "
        "the tokenizer that belongs to the model"
      )
    layers = params["layers"]
    if isinstance(layers, dict) and all(_on_one_cpu(w) for w in layers.values()):
      params = model.for_decoding(params)
    self._params, self._config, self._tokenizer = params, config, tokenizer
    self._batch_size = batch_size

  def generate(
    self,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    keys: Key[Array, " p"] | None = None,
    seed: int = 0,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    callback: Callable[[int, str], Any] | None = None,
    chunk: int = 8,
  ) -> list[Completion]:
    """Completes each prompt `n` times; the completions of the first prompt come first.

    Args:
      prompts: texts to continue, conversations to answer (lists of messages with `role` and
        `content`), or lists of tokens.
      n: completions of each prompt.
      keys: a typed key for each prompt; its completion `j` uses `fold_in(key, j)`, and so does not
        depend on the other prompts. When None,
      seed: gives prompt `i` the key `fold_in(jax.random.key(seed), i)`.
      max_new_tokens: longest completion.
      temperature, top_k, top_p, min_p: see `foliax.language.sampling.Sampling`.
      stop: texts that end a completion and are not part of it.
      stop_ids: tokens that end a completion; those of the tokenizer when None.
      callback: called with the index of a completion and the next piece of its text; the pieces
        of an index, one after the other, are the text.
      chunk: tokens between two looks at the text, if there are stop texts or a callback.
    Returns:
      A completion for each prompt and `j`, in order.
    Raises:
      ValueError: as `foliax.language.generate.generate`, or an argument that is none of these.
    """
    if not prompts or n < 1:
      raise ValueError(f"there are {len(prompts)} prompts and n is {n}; both must be at least 1")
    if isinstance(stop, str) or not all(stop):
      raise ValueError(f"stop is {stop!r}; use a list of texts that are not empty")
    if keys is None:
      keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    if keys.shape[0] != len(prompts):
      raise ValueError(f"keys has {keys.shape[0]} keys for {len(prompts)} prompts; give one each")
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, jnp.arange(n))
    stop_ids = self._tokenizer.stop_ids if stop_ids is None else tuple(stop_ids)
    tokens = [self._encode(prompt) for prompt in prompts]
    lengths = np.array([len(ids) for ids in tokens])
    _check(self._config, *pad(tokens), keys.size, max_new_tokens, stop_ids, chunk)
    _check_room(self._config, None, 0, int(lengths.max()), max_new_tokens)

    texts = [_Text(self._tokenizer, stop, stop_ids) for _ in range(keys.size)]
    completions: dict[int, Completion] = {}
    together = max(1, self._batch_size // n)
    order = np.argsort(lengths, kind="stable")
    for chosen in np.split(order, range(together, len(order), together)):
      # Few sizes of batches: the last prompt fills them up, in rows that have ended at once.
      size = min(together, 1 << (len(chosen) - 1).bit_length())
      filled = np.append(chosen, np.repeat(chosen[-1], size - len(chosen)))
      rows = [int(i) * n + j for i in chosen for j in range(n)]

      def look(new: list[np.ndarray], rows: list[int] = rows) -> list[bool]:
        ended = [False] * len(new)
        for place, index in enumerate(rows):
          piece = texts[index].push(new[place].tolist())
          if callback is not None and piece:
            callback(index, piece)
          ended[place] = texts[index].cut is not None
        return ended

      prompts_array, ends = pad([tokens[i] for i in filled])
      options = sampling(size * n, temperature, top_k, top_p, min_p)
      result = run(
        self._params, self._config, prompts_array, ends, keys[filled].reshape(-1), options,
        max_new_tokens, stop_ids, look if stop or callback is not None else None, chunk,
        unused=np.arange(size * n) >= len(rows),
      )  # fmt: skip
      completions |= _completions(result, rows, texts, callback)
    return [completions[index] for index in range(keys.size)]

  def _encode(self, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
      return self._tokenizer.prompt(prompt)
    if prompt and isinstance(prompt[0], Mapping):
      return self._tokenizer.chat(cast(Sequence[Mapping[str, Any]], prompt))
    return [operator.index(token) for token in cast(Sequence[int], prompt)]


def _on_one_cpu(weight: Any) -> bool:
  if not isinstance(weight, jax.Array) or isinstance(weight, jax.core.Tracer):
    return False
  return [device.platform for device in weight.devices()] == ["cpu"]


def _completions(
  result: Generation,
  rows: list[int],
  texts: list["_Text"],
  callback: Callable[[int, str], Any] | None,
) -> dict[int, Completion]:
  """What became of the first rows, by index."""
  fields = {name: np.asarray(value) for name, value in result._asdict().items() if name != "cache"}
  completions = {}
  for place, index in enumerate(rows):
    text, end = texts[index], int(fields["lengths"][place])
    text.push(fields["tokens"][place, text.taken : end].tolist())
    piece = text.finish()
    if callback is not None and piece:
      callback(index, piece)
    reason = "stop" if fields["stopped"][place] or text.cut is not None else "length"
    kept = text.tokens_kept
    completions[index] = Completion(
      text.text,
      fields["tokens"][place, :kept].tolist(),
      fields["log_probs"][place, :kept].tolist(),
      reason if fields["ok"][place] else "error",
      fields["sample_log_probs"][place, :kept].tolist(),
    )
  return completions


class _Text:
  """The text of one row, whose tokens come a few at a time, up to a stop text.

  Attributes:
    text: so far.
    cut: length of the text where a stop text cut it, or None.
    taken: number of tokens taken.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], stop_ids: Sequence[int]):
    self.text = ""
    self.cut: int | None = None
    self.taken = 0
    self._decoder, self._stop, self._stop_ids = StreamDecoder(tokenizer), stop, set(stop_ids)
    self._lengths: list[int] = []  # of the text, after each token
    self._sent = 0

  @property
  def tokens_kept(self) -> int:
    """How many tokens the text needs: all, unless a stop text cut it."""
    if self.cut is None:
      return self.taken
    return next(i for i, length in enumerate([0, *self._lengths]) if length >= self.cut)

  def push(self, tokens: list[int]) -> str:
    """Takes tokens, and returns what they add to the text that no stop text can still cut."""
    for token in tokens:
      self.taken += 1
      if self.cut is None:
        self._extend("" if token in self._stop_ids else self._decoder.push(token))
    return self._send(len(self.text) - (0 if self.cut is not None else self._held()))

  def finish(self) -> str:
    """The rest of the text, after the last token."""
    if self.cut is None:
      self._extend(self._decoder.flush())
    return self._send(len(self.text))

  def _extend(self, piece: str) -> None:
    before = len(self.text)
    self.text += piece
    starts = [self.text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
    found = [start for start in starts if start >= 0]
    self._lengths.append(len(self.text))
    if found:
      self.cut = min(found)
      self.text = self.text[: self.cut]

  def _held(self) -> int:
    """Length of the longest end of the text that may be the beginning of a stop text."""
    ends = (k for s in self._stop for k in range(1, len(s)) if self.text.endswith(s[:k]))
    return max(ends, default=0)

  def _send(self, end: int) -> str:
    piece, self._sent = self.text[self._sent : end], max(self._sent, end)
    return piece


def _known(*arrays: Array | np.ndarray) -> bool:
  """Whether this process has the values: they are not traced, nor elsewhere."""
  return not any(
    isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable)
    for x in arrays
  )


def _check(
  config: model.Config,
  prompts: Int[Array, "b t"],
  lengths: Int[Array, " b"],
  rows: int,
  max_new_tokens: int,
  stop_ids: Sequence[int],
  chunk: int,
) -> None:
  b, t = prompts.shape
  if b == 0:
    raise ValueError("prompts has 0 rows; give at least one prompt")
  if rows == 0 or rows % b:
    raise ValueError(f"keys has {rows} keys for {b} prompts; give the same number for each prompt")
  for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  for token in stop_ids:
    if not 0 <= token < config.vocab_size:
      raise ValueError(f"stop_ids has {token}; tokens go from 0 to {config.vocab_size - 1}")
  if not _known(prompts, lengths):
    return
  ends = np.asarray(lengths)
  for i in np.flatnonzero((ends < 1) | (ends > t)):
    if ends[i] == 0:
      raise ValueError(f"prompt {i} is empty; give at least one token, such as the one for begin")
    raise ValueError(f"lengths[{i}] is {ends[i]}; it must be from 1 to the {t} columns of prompts")
  real = np.arange(t) < ends[:, None]
  tokens = np.asarray(prompts)
  wrong = np.argwhere(real & ((tokens < 0) | (tokens >= config.vocab_size)))
  if wrong.size:
    i, j = wrong[0]
    raise ValueError(
      f"token {j} of prompt {i} is {tokens[i, j]}; the model knows 0 to {config.vocab_size - 1}: "
      "use the tokenizer that belongs to it"
    )


def _check_room(
  config: model.Config, cache: model.Cache | None, used: int, width: int, max_new_tokens: int
) -> None:
  rooms = {"the model's context": config.context}
  if cache is not None:
    rooms["the cache's capacity"] = cache.capacity
  for name, room in rooms.items():
    if used + width + max_new_tokens > room:
      before = f"{used} tokens in the cache and " if used else ""
      raise ValueError(
        f"{before}a prompt of {width} tokens and max_new_tokens {max_new_tokens} exceed {name} of "
        f"{room}; use max_new_tokens up to {max(0, room - used - width)} or a shorter prompt"
      )
