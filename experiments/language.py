"""The decoder on real weights: is it the same model elsewhere, how fast is it, does it learn?

SmolLM2-135M-Instruct, read from a GGUF file: logits and greedy text against transformers reading
the same file, decoding with and without a cache, speed on the CPU side by side with transformers
and llama.cpp in one run, and low-rank adaptation to text that the model has not been given. What
needs torch runs under `config.peers_python`. At smoke scale a tiny random decoder stands in.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from foliax.experiments import language_figures, language_peer
from foliax.experiments.claims import (
  Claim,
  Interval,
  claim,
  difference_interval,
  mean_interval,
  ratio_interval,
)
from foliax.experiments.context import Context
from foliax.language import corpus, generate, lora, loss, model, pretrained, tokenizer, weights
from foliax.training import step

TITLE = "Decoder language model"
PAPER = "2302.13971"
CAPTIONS = language_figures.CAPTIONS

BATCHES = (1, 8, 32)
THREADS = 2
_BANDWIDTH_FLOATS = 100_000_000


def get_config(scale: str) -> ml_collections.ConfigDict:
  """Sizes of the experiment.

  Command: `foliax run language:laptop --config.peers_python=.venv-peers/bin/python`. Time: six
  minutes on two cores, and three more with the peers. Expect: logits within 0.002 of transformers',
  the same greedy text, and a held-out loss that low-rank adaptation lowers by some tenths of a nat.

  Fields:
    model: `smollm2`, or `tiny` for a random decoder over bytes.
    prompts: how many, cut from Python's manual; prompt_tokens: of each.
    greedy_tokens: length of greedy continuations.
    seeds: adaptations, each with its own adapters and order of batches.
    rank, alpha, learning_rate, lora_steps: of the adaptation; rows, sequence: of its batches;
      held_out_rows: rows of the last tenth of the text, on which the loss is measured.
    decode_tokens: tokens in a timed decode; prefill_tokens: of a timed prompt; timing_repeats:
      rounds, in each of which every implementation is timed once.
    peers_python: an interpreter with the `peers` extra, or empty.
  """
  config = {
    "seed": 0,
    "model": "smollm2",
    "prompts": 20,
    "prompt_tokens": 32,
    "greedy_tokens": 64,
    "seeds": 3,
    "rank": 8,
    "alpha": 16.0,
    "learning_rate": 5e-4,
    "lora_steps": 50,
    "rows": 2,
    "sequence": 64,
    "held_out_rows": 12,
    "decode_tokens": 32,
    "prefill_tokens": 512,
    "timing_repeats": 5,
    "peers_python": "",
  }
  if scale == "smoke":
    config |= {"model": "tiny", "prompts": 3, "prompt_tokens": 8, "greedy_tokens": 4, "seeds": 2}
    config |= {"lora_steps": 8, "held_out_rows": 4, "sequence": 32, "rank": 2, "prefill_tokens": 16}
    config |= {"decode_tokens": 64, "timing_repeats": 3, "learning_rate": 1e-2}
  elif scale != "laptop":
    raise ValueError(f"scale is {scale!r}; allowed: smoke, laptop")
  return ml_collections.ConfigDict(config)


# What is measured.


def run(config: ml_collections.ConfigDict, context: Context) -> dict[str, Any]:
  """Measures everything; each piece is done once in the life of the work directory."""
  pieces: dict[str, Callable[[], Any]] = {
    "cache": functools.partial(_cache, config),
    "heat": functools.partial(_heat, config),
  }
  for seed in range(config.seeds):
    pieces[f"adaptation/{seed}"] = functools.partial(_adapt, config, context, seed)
  results: dict[str, Any] = {}
  with contextlib.ExitStack() as stack:
    peer = None
    if config.peers_python:
      peer = functools.cache(lambda: stack.enter_context(contextlib.closing(_Peer(config))))
      pieces["parity"] = lambda: _parity(config, peer())
    pieces["speed"] = lambda: _speed(config, None if peer is None else peer())
    with context.progress("language", len(pieces)) as bar:
      for name, piece in pieces.items():
        results[name] = context.stage(name, piece)
        bar.advance()
  adaptations = [results.pop(f"adaptation/{seed}") for seed in range(config.seeds)]
  return results | {"adaptations": adaptations, "model": config.model}


@functools.cache
def _loaded(name: str) -> tuple[model.Params, model.Config, tokenizer.Tokenizer]:
  """Stacked parameters, their description, and the tokenizer."""
  if name == "smollm2":
    path = pretrained.fetch(name)
    return *weights.load(path), tokenizer.from_gguf(path)
  if name != "tiny":
    raise ValueError(f"model is {name!r}; allowed: smollm2, tiny")
  letters = tokenizer.byte_level()
  config = model.Config(letters.vocab_size, 32, 2, 4, 2, 8, 64)
  return model.init(jax.random.key(0), config), config, letters


@functools.cache
def _for_decoding(name: str) -> model.Params:
  return model.for_decoding(_loaded(name)[0])


@functools.cache
def _text(name: str) -> tuple[int, ...]:
  """Tokens of Python's manual."""
  bytes_ = corpus.Corpus()
  text = bytes(bytes_.read(0, len(bytes_)).astype(np.uint8)).decode()
  return tuple(_loaded(name)[2].encode(text))


def _prompts(config) -> np.ndarray:
  text = np.asarray(_text(config.model), np.int32)
  starts = np.linspace(0, len(text) * 0.9, config.prompts).astype(int)
  return np.stack([text[start : start + config.prompt_tokens] for start in starts])


_forward = jax.jit(model.forward, static_argnums=1)
_forward_cached = jax.jit(model.forward_cached, static_argnums=1)


def _cache(config) -> dict[str, Any]:
  """Largest differences between decoding with a cache and without, and after a rollback."""
  params, description, _ = _loaded(config.model)
  fast = _for_decoding(config.model)
  prompts = jnp.asarray(_prompts(config))
  half = config.prompt_tokens // 2
  plain, _ = _forward(params, description, prompts)
  cache = model.init_cache(fast, description, len(prompts), config.prompt_tokens)
  first, _, cache = _forward_cached(fast, description, prompts[:, :half], cache)
  second, _, direct = _forward_cached(fast, description, prompts[:, half:], cache)
  other = jnp.flip(prompts, 1)[:, half:]
  _, _, astray = _forward_cached(fast, description, other, cache)
  back = model.rollback(astray, cache.lengths)
  again, _, _ = _forward_cached(fast, description, prompts[:, half:], back)
  cached = jnp.concatenate([first, second], 1)
  return {
    "rows": len(prompts),
    "cached": float(jnp.abs(cached - plain).max()),
    "rolled back": float(jnp.abs(again - second).max()),
    "scale": float(jnp.abs(plain).max()),
    "lengths": direct.lengths.tolist()[:1],
  }


def _heat(config) -> dict[str, Any]:
  """How likely the model finds each token of a text."""
  params, description, words = _loaded(config.model)
  text = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Oslo."
  )
  tokens = words.encode(text)
  scores = generate.score(params, description, jnp.asarray([tokens]), jnp.asarray([len(tokens)]))
  return {"tokens": [words.decode([t]) for t in tokens], "log probs": scores[0].round(3).tolist()}


def _adapt(config, context, seed) -> dict[str, Any]:
  """Held-out losses, a row each, before and after low-rank adaptation; losses on the way."""
  params, description, _ = _loaded(config.model)
  text = np.asarray(_text(config.model), np.int32)
  cut = int(0.9 * len(text))
  key = jax.random.fold_in(jax.random.key(config.seed), seed)
  width = config.sequence + 1

  def rows_at(starts, part):
    return jnp.asarray(np.stack([part[s : s + width] for s in starts]))

  # The same rows for all seeds, spread over the held-out text.
  held_out = rows_at(
    np.linspace(0, len(text) - cut - width, config.held_out_rows).astype(int), text[cut:]
  )
  starts = np.random.default_rng([config.seed, seed]).integers(
    0, cut - width, (config.lora_steps, config.rows)
  )

  def row_losses(adapters, rows, params):
    adapted = lora.apply(params, adapters, config.alpha)
    hidden = model.hidden_states(adapted, description, rows[:, :-1])
    return loss.token_losses(adapted, description, hidden, rows[:, 1:]).mean(-1)

  optimizer = optax.adam(config.learning_rate)

  @jax.jit
  def update(state, rows, params):  # an argument: captured weights would be compiled in
    mean_loss = lambda adapters, rows, _: (row_losses(adapters, rows, params).mean(), {})
    return step.gradient_step(mean_loss, optimizer)(state, rows)

  evaluate = jax.jit(row_losses)
  state = step.init(lora.init(key, params, config.rank), optimizer, key)
  before = evaluate(state.params, held_out, params)
  losses = []
  with context.progress(f"adaptation {seed}", config.lora_steps) as bar:
    for i in range(config.lora_steps):
      state, metrics = update(state, rows_at(starts[i], text), params)
      losses.append(float(metrics["loss"]))
      context.scalars(f"adaptation-{seed}", {"training loss": losses[-1]}, i)
      bar.advance()
  after = evaluate(state.params, held_out, params)
  return {"before": before.tolist(), "after": after.tolist(), "training": losses}


# Side by side with other libraries.


class _Peer:
  """Another library's process; called with a command and its arguments, it gives the answer."""

  def __init__(self, config):
    self.python = config.peers_python
    self._child = subprocess.Popen(
      [self.python, "-P", str(pathlib.Path(language_peer.__file__))],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"TQDM_DISABLE": "1"},
    )
    try:
      path = pretrained.fetch(config.model)
      self.versions = self("load", path=str(path), threads=THREADS)["versions"]
    except BaseException:
      self.close()
      raise

  def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
    assert self._child.stdin is not None
    assert self._child.stdout is not None
    print(json.dumps({"command": command} | arguments), file=self._child.stdin, flush=True)
    answer = json.loads(self._child.stdout.readline() or '{"error": "it ended"}')
    if "error" in answer:
      raise RuntimeError(f"{self.python}: {command}: {answer['error']}")
    return answer

  def close(self) -> None:
    """Ends the process."""
    self._child.kill()
    self._child.communicate()


def _parity(config, ask) -> dict[str, Any]:
  """Largest difference of logits for each prompt, and whether greedy texts are the same."""
  params, description, words = _loaded(config.model)
  prompts = _prompts(config)
  ours, _ = _forward(params, description, jnp.asarray(prompts))
  with tempfile.TemporaryDirectory() as folder:
    ask("logits", prompts=prompts.tolist(), out=f"{folder}/logits")
    theirs = np.stack([np.load(f"{folder}/logits-{i}.npy") for i in range(len(prompts))])
  mine = _generate(config, prompts, config.greedy_tokens)
  other = ask("greedy", prompts=prompts.tolist(), count=config.greedy_tokens)["tokens"]
  return {
    "logits": np.abs(np.asarray(ours) - theirs).max((1, 2)).tolist(),
    "scale": float(np.abs(theirs).max()),
    "same text": [a == b for a, b in zip(mine.tolist(), other, strict=True)],
    "example": words.decode(mine[0].tolist()),
    "versions": ask.versions,
  }


def _generate(config, prompts: np.ndarray, count: int) -> np.ndarray:
  """Greedy tokens, `[b, count]`."""
  _, description, _ = _loaded(config.model)
  rows = len(prompts)
  out = generate.generate(
    _for_decoding(config.model),
    description,
    jnp.asarray(prompts),
    jnp.full(rows, prompts.shape[1]),
    jax.random.split(jax.random.key(0), rows),
    max_new_tokens=count,
    temperature=0.0,
  )
  return np.asarray(out.tokens)


def _speed(config, ask) -> dict[str, Any]:
  """Seconds a step, by implementation and batch, one sample a round."""
  prompt = np.asarray(_text(config.model)[: config.prompt_tokens], np.int32)
  long = np.asarray(_text(config.model)[: config.prefill_tokens], np.int32)
  count = config.decode_tokens

  def seconds(rows, tokens):
    start = time.perf_counter()
    _generate(config, rows, tokens)
    return time.perf_counter() - start

  def ours(batch):
    rows = np.tile(prompt, (batch, 1))
    return (seconds(rows, count + 1) - seconds(rows, 1)) / count

  for batch in BATCHES:  # compiles
    ours(batch)
  seconds(long[None], 1)

  def theirs(name, **arguments):
    return lambda: ask(name, **arguments)["seconds"]

  arms: dict[str, Callable[[], float]] = {
    f"foliax {batch}": functools.partial(ours, batch) for batch in BATCHES
  }
  arms["foliax prefill"] = lambda: seconds(long[None], 1)
  if ask is not None:
    short = prompt.tolist()
    for batch in BATCHES:
      arms[f"transformers {batch}"] = theirs("decode", batch=batch, prompt=short, count=count)
    arms["transformers prefill"] = theirs("prefill", prompt=long.tolist())
    if "llama-cpp-python" in ask.versions:
      arms["llama.cpp 1"] = theirs("llama_decode", prompt=short, count=count)
  samples: dict[str, list[float]] = {name: [] for name in [*arms, "read"]}
  for _ in range(config.timing_repeats):
    for name, arm in arms.items():
      samples[name].append(arm())
    samples["read"].append(_seconds_to_read())
  params, _, _ = _loaded(config.model)
  return {
    "seconds": samples,
    "weight bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    "read bytes": _BANDWIDTH_FLOATS * 4,
    "threads": THREADS,
    "python": sys.version.split()[0],
  }


def _seconds_to_read() -> float:
  """Time in which the fastest of a few reductions reads an array that no cache holds."""
  vector = jnp.ones(_BANDWIDTH_FLOATS)
  matrix = vector.reshape(-1, 1000)
  times = []
  for function, array in ((_sum, vector), (_times_ones, matrix)):
    function(array).block_until_ready()
    for _ in range(3):
      start = time.perf_counter()
      function(array).block_until_ready()
      times.append(time.perf_counter() - start)
  return min(times)


_sum = jax.jit(jnp.sum)
_times_ones = jax.jit(lambda matrix: matrix @ jnp.ones(matrix.shape[1]))


# What must hold.


def claims(results: dict[str, Any]) -> list[Claim]:
  """The claims, in the order of the report."""
  parity, cache, speed = results.get("parity"), results["cache"], results["speed"]
  exact = lambda x: Interval(x, x, x)
  texts = [] if parity is None else parity["same text"]
  before = np.mean([a["before"] for a in results["adaptations"]], 0)
  after = np.mean([a["after"] for a in results["adaptations"]], 0)
  seconds = speed["seconds"]

  def ratio(slow, fast):
    return ratio_interval(seconds[slow], seconds[fast]) if slow in seconds else None

  # The time in which the weights could be read, over the time of a step that reads them once.
  scale = speed["weight bytes"] / speed["read bytes"]
  roofline = ratio_interval([scale * s for s in seconds["read"]], seconds["foliax 1"])
  return [
    claim(
      "P1",
      "Logits are transformers' on the same file: the largest difference is at most 0.002.",
      None if parity is None else exact(max(parity["logits"])),
      "<=",
      2e-3,
      "Needs the peers environment: --config.peers_python=PYTHON."
      if parity is None
      else f"{len(texts)} prompts; logits reach {parity['scale']:.0f}.",
    ),
    claim(
      "P2",
      "Greedy continuations are transformers', token for token.",
      None if parity is None else exact(sum(texts) / len(texts)),
      ">=",
      1.0,
      "" if parity is None else f"{sum(texts)} of {len(texts)} texts.",
    ),
    claim(
      "C1",
      "Decoding with a cache gives the logits of a forward pass without one, to 0.0001.",
      exact(cache["cached"]),
      "<=",
      1e-4,
      f"Logits reach {cache['scale']:.0f}.",
    ),
    claim(
      "C2",
      "After a rollback decoding goes on as if what was forgotten had never been there.",
      exact(cache["rolled back"]),
      "<=",
      0.0,
    ),
    claim(
      "F1",
      "Low-rank adaptation for 50 steps lowers the loss on held-out text.",
      difference_interval(after, before),
      "<",
      0.0,
      f"In nats a token, from {before.mean():.2f} to {after.mean():.2f}; mean over "
      f"{len(results['adaptations'])} seeds, interval over held-out rows.",
    ),
    *(
      claim(
        f"D{batch}",
        f"Decoding at batch {batch} is at least {least} times as fast as transformers'.",
        ratio(f"transformers {batch}", f"foliax {batch}"),
        ">=",
        least,
        f"{_rate(seconds, f'foliax {batch}', batch)} tokens a second.",
      )
      for batch, least in ((1, 2.5), (8, 1.5), (32, 1.5))
    ),
    claim(
      "M1",
      "A step at batch 1 takes at most 1/0.7 of the time in which memory can be read once.",
      roofline,
      ">=",
      0.7,
      f"Memory is read at {speed['read bytes'] / np.median(seconds['read']) / 1e9:.0f} GB/s.",
    ),
    claim(
      "L1",
      "Decoding at batch 1 in float32 takes at most 1.5 times as long as llama.cpp on four bits.",
      ratio("foliax 1", "llama.cpp 1") if "llama.cpp 1" in seconds else None,
      "<=",
      1.5,
      "It reads a seventh of the bytes."
      if "llama.cpp 1" in seconds
      else "Needs llama-cpp-python in the peers environment.",
    ),
    claim(
      "D512",
      "A prompt is read no slower than by transformers.",
      ratio("transformers prefill", "foliax prefill"),
      ">=",
      1.0,
    ),
  ]


def _rate(seconds: dict[str, list[float]], name: str, batch: int) -> str:
  return f"{mean_interval([batch / s for s in seconds[name]]).value:.0f}"


def figures(results: dict[str, Any]) -> dict[str, Any]:
  """What was measured, drawn; see `CAPTIONS`."""
  return language_figures.draw(results)
