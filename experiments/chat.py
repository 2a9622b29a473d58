"""A conversation with a language model in the terminal: `foliax chat smollm2`.

Answers go to standard output, everything else to standard error. It needs nothing of the terminal
but lines of text.
"""

import contextlib
import importlib
import io
import pathlib
import signal
import sys
import time
import unicodedata
from typing import Any

import jax
from foliax.experiments.registry import UserError

TOP_P = 0.9
# What to say of an answer, by how it ended.
_ENDS = {
  "stopped": ", stopped",
  "length": ", cut at --max-tokens",
  "error": ", ended by logits that are not finite",
}


class Chat:
  """A conversation.

  Attributes:
    messages: of the conversation so far, those that were dropped excepted.
  """

  def __init__(
    self,
    generator: Any,
    tokenizer: Any,
    context: int,
    *,
    system: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    max_tokens: int = 512,
  ):
    """Starts a conversation.

    Args:
      generator: a `foliax.language.generate.Generator`, or what has its interface.
      tokenizer: counts, with a chat template.
      context: tokens that the model can see at once.
      system: instructions before the first question, or None for the template's own.
      temperature: 0 takes the likeliest token each time.
      seed: of the random numbers; the same seed and questions give the same answers.
      max_tokens: longest answer.
    Raises:
      UserError: an option out of range, or a model that cannot chat.
    """
    if not 0 <= temperature < float("inf"):
      raise UserError(f"--temperature is {temperature}; it must be 0 or more")
    if not 0 < max_tokens < context:
      raise UserError(f"--max-tokens is {max_tokens}; it must be from 1 to {context - 1}")
    if not 0 <= seed < 2**31:
      raise UserError(f"--seed is {seed}; it must be from 0 to {2**31 - 1}")
    if tokenizer.chat_template is None:
      raise UserError("the model has no chat template; choose one that is made for conversations")
    self._generator, self._tokenizer = generator, tokenizer
    self._room = context - max_tokens
    self._options = {
      "temperature": temperature,
      "top_p": TOP_P,
      "max_new_tokens": max_tokens,
      "chunk": 4,
    }
    self._seed, self._turns = seed, 0
    self.messages = [] if system is None else [{"role": "system", "content": system}]
    self._fixed = len(self.messages)

  def ask(self, question: str) -> bool:
    """Writes the answer to a question as it comes, and how fast it was.

    An answer that Ctrl-C stops stays in the conversation as far as it got.

    Args:
      question: the user's message.
    Returns:
      Whether the answer was not stopped.
    Raises:
      ValueError: the question is no text or too long; the conversation is as before.
    """
    messages, dropped = self._within(question)
    if dropped:
      _say(f"[the context is full: the {dropped} oldest messages are forgotten]")
    pieces: list[str] = []

    def write(_: int, piece: str) -> None:
      pieces.append(piece)
      print(_shown(piece), end="", flush=True)

    keys = jax.random.fold_in(jax.random.key(self._seed), self._turns)[None]
    begin = time.perf_counter()
    try:
      (answer,) = self._generator.generate([messages], keys=keys, callback=write, **self._options)
      end = answer.finish_reason
    except KeyboardInterrupt:
      end = "stopped"
    seconds = time.perf_counter() - begin
    print(flush=True)
    text = "".join(pieces)
    if text:
      self.messages = [*messages, {"role": "assistant", "content": text}]
      self._turns += 1
    count = len(self._tokenizer.encode(text))
    _say(f"[{count} tokens, {count / seconds:.1f} tokens/s{_ENDS.get(end, '')}]")
    return end != "stopped"

  def _within(self, question: str) -> tuple[list[dict[str, str]], int]:
    """The messages with the question, without the oldest turns that leave no room for an answer."""
    fixed, turns = self.messages[: self._fixed], self.messages[self._fixed :]
    asked = {"role": "user", "content": question}
    for dropped in range(0, len(turns) + 1, 2):
      messages = [*fixed, *turns[dropped:], asked]
      count = len(self._tokenizer.chat(messages))
      if count <= self._room:
        return messages, dropped
    raise ValueError(
      f"the question takes {count} tokens, and there is room for {self._room}; shorten it, or "
      "lower --max-tokens"
    )


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _shown(text: str) -> str:
  """Text without control characters, with which a model could move the cursor."""
  return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def load(model: str, **options: Any) -> Chat:
  """A conversation with a model.

  Args:
    model: a name that `foliax fetch` knows, a `.gguf` file, or a directory with safetensors.
    options: as `Chat`.
  Returns:
    The conversation.
  Raises:
    UserError: there is no such model, or it cannot be loaded or chat.
  """
  from foliax.language import generate, pretrained, tokenizer, weights

  if jax.config.jax_compilation_cache_dir is None:  # compiling takes longer than an answer
    jax.config.update("jax_compilation_cache_dir", str(pretrained.cache_folder() / "compiled"))
  path = pathlib.Path(model)
  try:
    if not path.exists():
      if model not in pretrained.MODELS:
        raise UserError(
          f"there is no model and no file {model!r}; use one of {', '.join(pretrained.MODELS)}, a "
          ".gguf file, or a directory with safetensors"
        )
      path = pretrained.fetch(model)
    tokens = tokenizer.load(path)
    params, config = weights.load(path)
    generator = generate.Generator(params, config, tokens)
  except (OSError, RuntimeError, ValueError) as error:
    raise UserError(str(error)) from None
  return Chat(generator, tokens, config.context, **options)


def run(model: str, once: str | None = None, **options: Any) -> int:
  """Talks until the input ends.

  Args:
    model: as `load`.
    once: a single question, instead of those of the standard input.
    options: as `Chat`.
  Returns:
    Exit code.
  Raises:
    UserError: the model cannot be loaded, or the single question cannot be asked.
    KeyboardInterrupt: the single answer was interrupted.
  """
  for stream in (sys.stdout, sys.stderr):
    # A terminal that cannot show a character shows a question mark.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="replace")
  before = signal.signal(signal.SIGTERM, _leave)  # Ctrl-C ends an answer, this the program
  try:
    begin = time.perf_counter()
    chat = load(model, **options)
    _say(f"[{model} loaded in {time.perf_counter() - begin:.1f} s]")
    if once is None:
      _talk(chat)
    else:
      try:
        whole = chat.ask(once)
      except ValueError as error:
        raise UserError(str(error)) from None
      if not whole:
        raise KeyboardInterrupt
  finally:
    signal.signal(signal.SIGTERM, before)
  return 0


def _leave(*_: object) -> None:
  raise SystemExit(128 + signal.SIGTERM)


def _talk(chat: Chat) -> None:
  asks = sys.stdin.isatty()
  if asks:
    with contextlib.suppress(ImportError):
      importlib.import_module("readline")  # `input` then edits lines
    _say("[Ctrl-C stops an answer, Ctrl-D leaves]")
  while True:
    try:
      question = input("> " if asks else "").strip()
      if question:
        chat.ask(question)
    except EOFError:
      if asks:
        _say("")
      return
    except KeyboardInterrupt:
      _say("" if asks else "[stopped]")
    except ValueError as error:  # input that is no text, or a question that does not fit
      _say(f"foliax: {' '.join(str(error).split())}")
