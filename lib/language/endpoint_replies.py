"""What OpenAI-compatible servers answer: whole or streamed completions, and errors."""

import email.utils
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class EndpointError(RuntimeError):
  """The server could not be reached, refused, or answered with something else."""


class TryAgain(Exception):
  """An attempt failed in a way that may pass; `wait` is what the server asks for, in seconds."""

  def __init__(self, reason: str, wait: float | None = None):
    super().__init__(reason)
    self.wait = wait


class Answer:
  """What a server has answered so far.

  Attributes:
    told: characters that `piece` was called with.
    finish_reason: of the server, None before the end.
    usage: `prompt_tokens` and `completion_tokens`, if the server counts them.
  """

  def __init__(self, piece: Callable[[str], None] | None):
    """Starts empty.

    Args:
      piece: called with each further text, or None.
    """
    self._piece = piece
    self.told = 0
    self.finish_reason: str | None = None
    self.usage: Mapping[str, Any] = {}
    self._choices = 0
    self._text: list[str] = []
    self._tokens: list[str] = []
    self._log_probs: list[float] = []

  def add(self, reply: Any) -> None:
    """Takes a reply, or a piece of it.

    Raises:
      EndpointError: it is not what the protocol says.
    """
    try:
      text = self._read(reply)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise EndpointError(
        f"the reply is not one of an OpenAI-compatible server ({type(error).__name__}: {error}); "
        "check base_url"
      ) from None
    if text:
      self._text.append(text)
      if self._piece is not None:
        self.told += len(text)
        self._piece(text)

  def _read(self, reply: Any) -> str:
    if reply.get("error"):
      raise EndpointError(f"the server stopped: {reason(json.dumps(reply))}; ask again")
    self.usage = reply.get("usage") or self.usage
    if not reply["choices"]:
      return ""  # the last piece of a stream holds the usage alone
    choice = reply["choices"][0]
    said = choice.get("delta") or choice.get("message") or {}
    text = choice["text"] if "text" in choice else said.get("content")
    if not isinstance(text, str | None):
      raise TypeError(f"content is a {type(text).__name__}")
    self._choices += 1
    self.finish_reason = choice.get("finish_reason") or self.finish_reason
    given = choice.get("logprobs") or {}
    if given.get("content"):  # chat
      pairs = [(token["token"], token["logprob"]) for token in given["content"]]
    else:
      pairs = list(zip(given.get("tokens") or (), given.get("token_logprobs") or (), strict=False))
    self._tokens += [str(token) for token, _ in pairs]
    self._log_probs += [math.nan if value is None else float(value) for _, value in pairs]
    return text or ""

  def finished(self, hide: Callable[[str], str]) -> dict[str, Any]:
    """The whole answer, as plain JSON.

    Args:
      hide: replaces what must not be kept.
    Returns:
      `text`, `tokens` (texts), `log_probs` and `finish_reason`.
    Raises:
      EndpointError: there was none.
    """
    if not self._choices:
      raise EndpointError("the server answered without a choice; check base_url and the model")
    return {
      "text": hide("".join(self._text)),
      "tokens": self._tokens,
      "log_probs": self._log_probs,
      "finish_reason": self.finish_reason or "stop",
    }


def text(chunks: Iterator[bytes]) -> str:
  """A whole body."""
  return b"".join(chunks).decode("utf-8", "replace")


def events(chunks: Iterator[bytes]) -> Iterator[str]:
  """Data of server-sent events, up to `[DONE]`."""
  rest, data = b"", []
  for chunk in chunks:
    *lines, rest = (rest + chunk).split(b"\n")
    for line in lines:
      field = line.rstrip(b"\r").decode("utf-8", "replace")
      if field.startswith("data:"):
        data.append(field[5:].removeprefix(" "))
      elif not field and data:
        event, data = "\n".join(data), []
        if event == "[DONE]":
          return
        yield event


def parsed(body: str) -> Any:
  """JSON of a body.

  Raises:
    EndpointError: it is something else.
  """
  try:
    return json.loads(body)
  except ValueError:
    raise EndpointError(f"the reply {_short(body)!r} is not JSON; check base_url") from None


def reason(body: str) -> str:
  """What the body of an error says, in one line."""
  try:
    reply = json.loads(body)
    error = reply.get("error", reply)
    return _short(error["message"] if isinstance(error, dict) else error)
  except (ValueError, AttributeError, KeyError, TypeError):
    return _short(body) or "no reason given"


def _short(said: Any) -> str:
  line = " ".join(str(said).split())
  return line if len(line) <= 300 else f"{line[:300]}…"


def retry_after(header: str | None) -> float | None:
  """Seconds to wait by a `Retry-After` header: a number or a date (RFC 9110, section 10.2.3)."""
  if header is None:
    return None
  try:
    seconds = float(header)
  except ValueError:
    try:
      seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
      return None
  return max(seconds, 0.0) if math.isfinite(seconds) else None
