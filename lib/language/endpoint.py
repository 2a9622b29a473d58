"""A language model behind an OpenAI-compatible HTTP server, with the interface of `Generator`.

Prompts that are texts go to `/completions`, lists of messages to `/chat/completions`. The API key
is read from the environment for each request, and kept nowhere else: not in the object, its records
on disk, its errors or its logs.
"""

import collections
import hashlib
import json
import os
import pathlib
import queue
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from foliax.extras import require
from foliax.language import endpoint_replies
from foliax.language.endpoint_replies import Answer, EndpointError, TryAgain
from foliax.language.generate import Completion
from foliax.language.rate_limit import RateLimit, Stopped
from foliax.training import storage
from jaxtyping import Array, Key

_MODES = ("off", "record", "replay")
_TRY_AGAIN = (408, 409, 425, 429)  # and 500 to 599
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds
_LONGEST_REPLY = 2**26  # bytes
# Keys shorter than this are words such as EMPTY, for servers that want any; they hide nothing.
_SHORTEST_SECRET = 16
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Usage(NamedTuple):
  """What an `Endpoint` has used so far.

  Attributes:
    requests: sent to the server, including those sent again.
    replayed: answers taken from records instead.
    prompt_tokens, completion_tokens: as the server counts them.
    cost: in the currency of the prices; None without a price for the model.
  """

  requests: int = 0
  replayed: int = 0
  prompt_tokens: int = 0
  completion_tokens: int = 0
  cost: float | None = None


class Endpoint:
  """Generates with a model of a server.

  Use it as a context manager, or call `close`.
  """

  def __init__(
    self,
    base_url: str,
    model: str,
    *,
    api_key_env: str | None = "OPENAI_API_KEY",
    timeout_seconds: float = 120.0,
    retries: int = 6,
    requests_per_minute: float | None = None,
    tokens_per_minute: float | None = None,
    concurrency: int = 8,
    prices: Mapping[str, tuple[float, float]] | None = None,
    cache: str | os.PathLike | None = None,
    mode: str = "off",
    extra_body: Mapping[str, Any] | None = None,
  ):
    """Connects to nothing yet.

    Args:
      base_url: e.g. `https://api.openai.com/v1`, without credentials.
      model: name of the model at the server.
      api_key_env: environment variable that holds the API key; None sends none.
      timeout_seconds: a request that is not whole after this is sent again; a server that falls
        silent is noticed within twice that.
      retries: how often a request is sent again after 408, 409, 425, 429, 5xx, a timeout or a
        broken connection: after 0.5 s, 1 s, 2 s… up to 60 s, of which between half and all is taken
        at random, or after what the server asks for in `Retry-After`.
      requests_per_minute, tokens_per_minute: limits over any 60 s, None for none. Tokens are
        estimated before a request, and corrected by the usage that its answer reports.
      concurrency: requests at a time.
      prices: model -> (price of a million prompt tokens, of a million completion tokens).
      cache: folder of recorded answers, for the modes other than "off".
      mode: "off" asks the server; "record" takes answers that are recorded, and asks for and
        records the others; "replay" takes recorded ones only.
      extra_body: more fields of the request. None as a value leaves a field out: for models that
        want it, `{"max_tokens": None, "max_completion_tokens": 100}`.
    Raises:
      ValueError: an argument that is none of these.
      ModuleNotFoundError: httpx is not installed.
    """
    httpx = require("httpx", "language")
    parts = urllib.parse.urlsplit(base_url)
    secret = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or secret:
      # The url itself could hold a secret, so it is not repeated.
      raise ValueError(
        "base_url must be http(s)://host[:port]/path without user, password, query or fragment; "
        "give a key by api_key_env"
      )
    if mode not in _MODES:
      raise ValueError(f"mode is {mode!r}; use one of {', '.join(_MODES)}")
    if (mode == "off") != (cache is None):
      raise ValueError(
        f"mode {mode!r} with cache={cache!r}; give a folder for 'record' or 'replay'"
      )
    _at_least("concurrency", concurrency, 1)
    _at_least("retries", retries, 0)
    _at_least("requests_per_minute", requests_per_minute or 1, 1)
    _at_least("tokens_per_minute", tokens_per_minute or 1, 1)
    if not timeout_seconds > 0:
      raise ValueError(f"timeout_seconds is {timeout_seconds}; use a number above 0")
    self.base_url, self.model, self.mode = base_url.rstrip("/"), model, mode
    self._api_key_env, self._timeout, self._retries = api_key_env, timeout_seconds, retries
    self._concurrency, self._extra = concurrency, dict(extra_body or {})
    self._price = (prices or {}).get(model)
    self._cache = None if cache is None else pathlib.Path(cache)
    self._limit = RateLimit(requests_per_minute, tokens_per_minute)
    self._lock, self._telling = threading.Lock(), threading.Lock()
    self._usage = Usage(cost=None if self._price is None else 0.0)
    self._client = httpx.Client(timeout=timeout_seconds)
    self._broken = httpx.RequestError

  def __repr__(self) -> str:
    return f"Endpoint({self.base_url!r}, {self.model!r}, mode={self.mode!r})"

  def __enter__(self) -> "Endpoint":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the connections."""
    self._client.close()

  @property
  def usage(self) -> Usage:
    """What was used so far."""
    return self._usage

  def generate(
    self,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    keys: Key[Array, " p"] | None = None,
    seed: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    callback: Callable[[int, str], None] | None = None,
    log_probs: bool = True,
  ) -> list[Completion]:
    """Completes each prompt `n` times; the completions of the first prompt come first.

    Args:
      prompts: texts, conversations (lists of messages with `role` and `content`), or lists of
        tokens.
      n: completions of each prompt, each by a request of its own.
      keys: a typed key for each prompt, from which the seeds of its completions are taken; or
      seed: from which, with its place, the seed of each completion is taken; or neither, and the
        server draws. Not every server honours seeds.
      max_new_tokens: longest completion.
      temperature, top_p: see `sampling`.
      top_k, min_p: likewise, for servers that know them (vLLM, llama.cpp); sent unless 0.
      stop: texts that end a completion and are not part of it.
      callback: called with the index of a completion and the next piece of its text, by one thread
        at a time.
      log_probs: whether to ask for log-probabilities; some servers refuse that.
    Returns:
      A completion for each prompt and each of the `n`, in order. `tokens` are the server's token
      texts, and like `log_probs` empty where it offers none.
    Raises:
      ValueError: an argument that is none of these, or no API key.
      EndpointError: the server failed for one of the prompts; those that were answered before are
        recorded, in the mode "record".
    """
    _at_least("n", n, 1)
    _at_least("max_new_tokens", max_new_tokens, 1)
    if isinstance(stop, str) or not all(stop):
      raise ValueError(f"stop is {stop!r}; use a list of texts that are not empty")
    seeds = _seeds(len(prompts), n, keys, seed)
    fields: dict[str, Any] = {
      "max_tokens": max_new_tokens,
      "temperature": temperature,
      "top_p": top_p,
    }
    fields |= {name: value for name, value in (("top_k", top_k), ("min_p", min_p)) if value}
    if stop:
      fields["stop"] = list(stop)
    seen: collections.Counter[str] = collections.Counter()
    jobs = []
    for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n)):
      path, body = self._request(prompt, fields, seeds[index], log_probs)
      record = self._record(path, body, seen)
      piece = None if callback is None else self._reporter(callback, index)
      jobs.append((index, path, body, record, piece))
    return self._all(jobs)

  def _all(self, jobs: list[tuple[Any, ...]]) -> list[Completion]:
    """Does the jobs, some at a time; the first failure stops those that wait."""
    stopping = threading.Event()
    if len(jobs) < 2:
      return [self._complete(stopping, *job) for job in jobs]
    waiting = iter(enumerate(jobs))
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def work() -> None:
      while not stopping.is_set():
        with self._lock:
          place, job = next(waiting, (None, ()))
        if place is None:
          return
        try:
          done.put((place, self._complete(stopping, *job)))
        except BaseException as error:
          done.put((place, error))

    # Daemons: after a failure nobody waits for the requests that are under way.
    for _ in range(min(self._concurrency, len(jobs))):
      threading.Thread(target=work, daemon=True).start()
    completions = {}
    try:
      for _ in jobs:
        place, result = done.get()
        if isinstance(result, BaseException):
          raise result
        completions[place] = result
    finally:
      stopping.set()
    return [completions[place] for place in range(len(jobs))]

  def _request(
    self, prompt: Any, fields: dict[str, Any], seed: int | None, log_probs: bool
  ) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for a prompt."""
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
      prompt = prompt if isinstance(prompt, str) else list(prompt)
      path, body = "completions", {"prompt": prompt, **({"logprobs": 1} if log_probs else {})}
    else:
      path, body = "chat/completions", {"messages": [dict(message) for message in prompt]}
      body |= {"logprobs": True} if log_probs else {}
    body |= fields | ({} if seed is None else {"seed": seed}) | self._extra
    body = {"model": self.model} | {
      name: value for name, value in body.items() if value is not None
    }
    try:
      json.dumps(body, allow_nan=False).encode()
      json.dumps(body, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"a prompt or field cannot be sent as JSON: {error}; use plain text"
      ) from None
    return path, body

  def _reporter(self, callback: Callable[[int, str], None], index: int) -> Callable[[str], None]:
    def report(piece: str) -> None:
      with self._telling:
        callback(index, piece)

    return report

  def _record(
    self, path: str, body: dict[str, Any], seen: collections.Counter[str]
  ) -> pathlib.Path | None:
    """Where the answer is recorded; a repeated request of one call has an answer of its own."""
    if self._cache is None:
      return None
    request = json.dumps([self.base_url, path, body], sort_keys=True)
    seen[request] += 1
    name = hashlib.sha256(f"{seen[request]} {request}".encode()).hexdigest()
    return self._cache / f"{name}.json"

  def _complete(
    self,
    stopping: threading.Event,
    index: int,
    path: str,
    body: dict[str, Any],
    record: pathlib.Path | None,
    piece: Callable[[str], None] | None,
  ) -> Completion:
    answer = self._replayed(record, index)
    if answer is not None:
      with self._lock:
        self._usage = self._usage._replace(replayed=self._usage.replayed + 1)
      if piece is not None and answer["text"]:
        piece(answer["text"])
    else:
      answer = self._asked(stopping, index, path, body, piece)
      if record is not None:
        with self._lock:  # a temporary file bears the name of the process only
          storage.write_sealed(record, {"request": body, "answer": answer})
    return Completion(
      answer["text"], answer["tokens"], answer["log_probs"], answer["finish_reason"]
    )

  def _replayed(self, record: pathlib.Path | None, index: int) -> dict[str, Any] | None:
    if record is None:
      return None
    try:
      return storage.read_sealed(record)["answer"]
    except FileNotFoundError:
      if self.mode == "record":
        return None
      raise EndpointError(
        f"completion {index} has no recorded answer in {record.parent}; run once with mode='record'"
      ) from None
    except ValueError as error:
      if self.mode == "record":
        return None
      raise EndpointError(f"{error}; record it again with mode='record'") from None

  def _asked(
    self,
    stopping: threading.Event,
    index: int,
    path: str,
    body: dict[str, Any],
    piece: Callable[[str], None] | None,
  ) -> dict[str, Any]:
    """The server's answer, after as many attempts as it takes and may."""
    key = self._key()
    secret = key is not None and len(key) >= _SHORTEST_SECRET
    hide = (lambda text: text.replace(key, "[API key]")) if secret else str
    for attempt in range(self._retries + 1):
      entry = self._limit.wait(_estimate(body), stopping)
      with self._lock:
        self._usage = self._usage._replace(requests=self._usage.requests + 1)
      answer = Answer(piece)
      try:
        self._send(path, body if piece is None else body | _STREAM, key, hide, answer)
      except TryAgain as problem:
        if answer.told:
          raise EndpointError(
            f"completion {index}: {self.model} broke off after {answer.told} characters "
            f"({problem}); ask again"
          ) from None
        wait = problem.wait
        if wait is None:
          wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
        if attempt == self._retries or wait > _LONGEST_WAIT:
          asks = f", which asks to wait {wait:.0f} s" if wait > _LONGEST_WAIT else ""
          raise EndpointError(
            f"completion {index}: {problem}{asks}; gave up after {attempt + 1} of "
            f"{self._retries + 1} attempts; try later, or raise retries or timeout_seconds"
          ) from None
        if stopping.wait(wait):
          raise Stopped from None
      else:
        self._count(answer.usage, entry)
        return answer.finished(hide)
    raise AssertionError

  def _key(self) -> str | None:
    if self._api_key_env is None:
      return None
    key = os.environ.get(self._api_key_env, "").strip()
    if not key:
      raise ValueError(
        f"environment variable {self._api_key_env} holds no API key; export it, or pass "
        "api_key_env=None for a server that needs none"
      )
    if not key.isascii() or not key.isprintable():
      raise ValueError(
        f"environment variable {self._api_key_env} holds characters that no API key has; set it "
        "again"
      )
    return key

  def _send(
    self,
    path: str,
    body: dict[str, Any],
    key: str | None,
    hide: Callable[[str], str],
    answer: Answer,
  ) -> None:
    """One attempt; `answer` takes what comes.

    Raises:
      TryAgain: what may go better next time.
      EndpointError: what will not.
    """
    deadline = time.monotonic() + self._timeout
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
      with self._client.stream(
        "POST", f"{self.base_url}/{path}", json=body, headers=headers
      ) as response:
        chunks = self._chunks(response, deadline)
        if response.status_code != 200:
          self._refused(response, hide(endpoint_replies.text(chunks)))
        elif response.headers.get("content-type", "").startswith("text/event-stream"):
          for event in endpoint_replies.events(chunks):
            answer.add(endpoint_replies.parsed(hide(event)))
          if answer.finish_reason is None:
            raise TryAgain(f"the stream of {self.base_url} ended early")
        else:
          answer.add(endpoint_replies.parsed(hide(endpoint_replies.text(chunks))))
    except self._broken as error:
      reason = hide(" ".join(str(error).split())) or "no reason given"
      raise TryAgain(f"{type(error).__name__} at {self.base_url} ({reason})") from None

  def _chunks(self, response: Any, deadline: float) -> Iterator[bytes]:
    size = 0
    for chunk in response.iter_bytes():
      size += len(chunk)
      if size > _LONGEST_REPLY:
        raise EndpointError(f"{self.base_url} sent over {_LONGEST_REPLY} bytes; is it a model?")
      if time.monotonic() > deadline:
        raise TryAgain(f"no whole answer from {self.base_url} in {self._timeout} s")
      yield chunk

  def _refused(self, response: Any, text: str) -> None:
    """Raises what a status other than 200 means."""
    status = response.status_code
    said = f"{self.base_url} answered {status}: {endpoint_replies.reason(text)}"
    if status in _TRY_AGAIN or 500 <= status < 600:
      raise TryAgain(said, endpoint_replies.retry_after(response.headers.get("retry-after")))
    fix = {
      401: f"check the API key in {self._api_key_env}",
      403: f"check the API key in {self._api_key_env}, and what it may use",
      404: f"check base_url and model {self.model!r}",
    }.get(status, "change the request, for example log_probs, extra_body or the prompt")
    if 300 <= status < 400:
      fix = "give the base_url that it redirects to"
    raise EndpointError(f"{said}; {fix}")

  def _count(self, usage: Mapping[str, Any], entry: list[float]) -> None:
    prompt, completion = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    if prompt + completion:
      entry[1] = prompt + completion
    with self._lock:
      before = self._usage
      cost = before.cost
      if self._price is not None and cost is not None:
        cost += (prompt * self._price[0] + completion * self._price[1]) / 1e6
      self._usage = before._replace(
        prompt_tokens=before.prompt_tokens + prompt,
        completion_tokens=before.completion_tokens + completion,
        cost=cost,
      )


def _at_least(name: str, value: float, least: int) -> None:
  if not value >= least:
    raise ValueError(f"{name} is {value}; use at least {least}")


def _seeds(count: int, n: int, keys: Any, seed: int | None) -> list[int | None]:
  """A seed of 31 bits for each completion."""
  if keys is not None:
    if len(keys) != count:
      raise ValueError(f"{len(keys)} keys for {count} prompts; give one for each")
    sources = [row.tobytes() for row in np.asarray(jax.random.key_data(keys))]
  elif seed is not None:
    sources = [f"{seed} {index}".encode() for index in range(count)]
  else:
    return [None] * (count * n)
  digests = [
    hashlib.sha256(b"%d %b" % (j, source)).digest() for source in sources for j in range(n)
  ]
  return [int.from_bytes(digest[:4], "big") >> 1 for digest in digests]


def _estimate(body: Mapping[str, Any]) -> float:
  """Tokens of a request before it is known: four characters each, and the longest completion."""
  prompt = body.get("prompt") or "".join(str(m.get("content")) for m in body.get("messages", ()))
  return len(prompt) / (4 if isinstance(prompt, str) else 1) + (
    body.get("max_tokens") or body.get("max_completion_tokens") or 0
  )


def _count(usage: Mapping[str, Any], name: str) -> int:
  value = usage.get(name)
  return value if isinstance(value, int) and value > 0 else 0
