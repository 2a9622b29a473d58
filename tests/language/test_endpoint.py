"""Remote models: what is sent, tried again, recorded, counted, and never told to anybody."""

import http.server
import itertools
import json
import logging
import threading
import time
import traceback

import jax
import pytest
from foliax.language import endpoint, rate_limit
from foliax.language.endpoint import Endpoint, EndpointError

KEY = "sk-test-0123456789abcdef0123456789"


def completion(text, **more):
  usage = {"prompt_tokens": 7, "completion_tokens": 3}
  return {"choices": [{"text": text, "finish_reason": "stop", **more}], "usage": usage}


def chat(text, **more):
  message = {"message": {"role": "assistant", "content": text}, "finish_reason": "length"}
  return completion(text) | {"choices": [message | more]}


class Server:
  """An HTTP server whose answers a test scripts: (status, headers, body), a body, or a function.

  A body is JSON, or a list of chunks and seconds between them.
  """

  def __init__(self):
    self.requests, self.script, self.running = [], [], 0
    self.lock, self.most = threading.Lock(), 0
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with outer.lock:
          outer.requests.append((self.path, dict(self.headers), body, time.monotonic()))
          outer.running += 1
          outer.most = max(outer.most, outer.running)
          entry = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
        if callable(entry):
          entry = entry(body)
        status, headers, reply = entry if isinstance(entry, tuple) else (200, {}, entry)
        with outer.lock:
          outer.running -= 1
        if reply is None:  # breaks the connection
          self.close_connection = True
          return
        chunks = reply if isinstance(reply, list) else [json.dumps(reply).encode()]
        self.send_response(status)
        kind = "text/event-stream" if isinstance(reply, list) else "application/json"
        for name, value in {"content-type": kind, "connection": "close", **headers}.items():
          self.send_header(name, value)
        self.end_headers()
        for chunk in chunks:
          if isinstance(chunk, float):
            time.sleep(chunk)
            continue
          self.wfile.write(chunk)
          self.wfile.flush()
        self.close_connection = True

      def log_message(self, *_):
        pass

    self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
    threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

  @property
  def bodies(self):
    return [body for _, _, body, _ in self.requests]


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.setenv("OPENAI_API_KEY", KEY)
  monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
  server = Server()
  yield server
  server.http.shutdown()
  server.http.server_close()


def stream(*events, end=True):
  chunks = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
  return [b": a comment\r\n\r\n", *chunks, *([b"data: [DONE]\n\n"] if end else [])]


def delta(text, **more):
  return {"choices": [{"delta": {"content": text}, **more}]}


def test_texts_are_completed_and_messages_answered_in_order(server):
  server.script = [lambda body: completion("T") if "prompt" in body else chat("M")]
  messages = [{"role": "user", "content": "é"}]
  with Endpoint(server.url + "/", "small") as remote:
    answers = remote.generate(
      ["one", messages, "two"], seed=1, max_new_tokens=5, temperature=0.5, top_p=0.9, stop=["\n"]
    )
  assert [(a.text, a.finish_reason) for a in answers] == [
    ("T", "stop"),
    ("M", "length"),
    ("T", "stop"),
  ]
  sent = {body.get("prompt", "chat"): (path, body) for path, _, body, _ in server.requests}
  assert {name: path for name, (path, _) in sent.items()} == {
    "one": "/v1/completions",
    "two": "/v1/completions",
    "chat": "/v1/chat/completions",
  }
  body = sent["chat"][1]
  assert body.pop("seed") not in {sent["one"][1]["seed"], sent["two"][1]["seed"]}
  assert body == {
    "model": "small", "messages": messages, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9,
    "stop": ["\n"], "logprobs": True,
  }  # fmt: skip
  assert {headers["Authorization"] for _, headers, _, _ in server.requests} == {f"Bearer {KEY}"}


def test_extras_are_sent_when_asked_for_and_keys_give_seeds(server):
  server.script = [completion("x")]
  keys = jax.random.split(jax.random.key(0), 2)
  extra = {"repetition_penalty": 1.1, "max_tokens": None, "max_completion_tokens": 9}
  with Endpoint(server.url, "m", api_key_env=None, extra_body=extra, concurrency=1) as remote:
    remote.generate(["a", "a"], keys=keys, top_k=5, min_p=0.1, log_probs=False)
    remote.generate(["a"])
  first, second, plain = server.bodies
  assert (first["top_k"], first["min_p"], first["max_completion_tokens"]) == (5, 0.1, 9)
  assert first["seed"] != second["seed"]
  assert not {"max_tokens", "logprobs"} & set(first)
  assert not {"top_k", "min_p", "seed"} & set(plain)
  assert "Authorization" not in server.requests[0][1]


def test_each_prompt_is_completed_n_times(server):
  server.script = [lambda body: completion(str(body["prompt"]))]
  with Endpoint(server.url, "m") as remote:
    answers = remote.generate(["a", [1, 2]], n=2, seed=0)
  assert [answer.text for answer in answers] == ["a", "a", "[1, 2]", "[1, 2]"]
  assert len({body["seed"] for body in server.bodies}) == 4


def test_log_probs_come_along_where_they_are_offered(server):
  logged = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0]}
  content = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]}
  server.script = [
    completion("ab", logprobs=logged),
    chat("ab", logprobs=content),
    completion("ab"),
  ]
  with Endpoint(server.url, "m") as remote:
    for prompt in ("x", [{"role": "user", "content": "x"}]):
      (answer,) = remote.generate([prompt])
      assert (list(answer.tokens), list(answer.log_probs)) == (["a", "b"], [-0.5, -1.0])
    (answer,) = remote.generate(["x"])
    assert (list(answer.tokens), list(answer.log_probs)) == ([], [])


def test_pieces_of_a_stream_are_told_as_they_come(server):
  usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}
  end = delta("", finish_reason="stop")
  whole = b"".join(stream(delta(None), delta("Gr"), delta("üße"), end, usage))
  server.script = [(200, {}, [whole[i : i + 7] for i in range(0, len(whole), 7)])]  # splits ü
  told = []
  with Endpoint(server.url, "m", prices={"m": (1.0, 10.0)}) as remote:
    (answer,) = remote.generate(
      [[{"role": "user", "content": "x"}]], callback=lambda *x: told.append(x)
    )
    assert remote.usage == (1, 0, 2, 4, 42e-6)
  assert answer.text == "Grüße"
  assert told == [(0, "Gr"), (0, "üße")]
  assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
  "trouble",
  [
    (429, {"retry-after": "0"}, {"error": {"message": "slow down"}}),
    (500, {}, {}),
    (503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}),
    (200, {}, None),
    (200, {}, stream(delta("x"), end=False)),
  ],
  ids=["429", "500", "503", "broken connection", "broken stream"],
)
def test_what_may_pass_is_tried_again(server, trouble):
  server.script = [trouble, trouble, completion("at last")]
  with Endpoint(server.url, "m", prices={"m": (1e6, 1e6)}) as remote:
    assert remote.generate(["x"])[0].text == "at last"
    assert remote.usage == (3, 0, 7, 3, 10.0)


def test_waits_grow_at_random_and_heed_the_server(server, monkeypatch):
  monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.1)
  server.script = [(500, {}, {}), (500, {}, {}), (429, {"retry-after": "0.3"}, {}), completion("x")]
  with Endpoint(server.url, "m") as remote:
    remote.generate(["x"])
  times = [when for *_, when in server.requests]
  waits = [after - before for before, after in itertools.pairwise(times)]
  assert 0.05 <= waits[0] <= 0.25
  assert 0.1 <= waits[1] <= 0.35
  assert waits[2] >= 0.3


@pytest.mark.parametrize(
  ("reply", "said"),
  [
    ((500, {}, {"error": {"message": "no\nroom"}}), "500: no room; gave up after 3 of 3 attempts"),
    ((429, {"retry-after": "3600"}, {}), "asks to wait 3600 s; gave up after 1 of 3"),
    ((401, {}, {"error": {"message": "who?"}}), "401: who[?]; check the API key in OPENAI_API_KEY"),
    ((404, {}, {"error": "no model"}), "404: no model; check base_url and model 'm'"),
    ((400, {}, {"message": "logprobs?"}), "400: logprobs[?]; change the request, .*log_probs"),
    ((307, {"location": "http://elsewhere"}, {}), "give the base_url that it redirects to"),
    ({"hello": 1}, "not one of an OpenAI-compatible server .KeyError: 'choices'.; check base_url"),
    ({"choices": []}, "without a choice"),
    ([b"<html>"], "ended early"),
    ({"choices": [{"text": 3}]}, "content is a int"),
    ("text", "not one of an OpenAI-compatible server"),
    ([b"data: {\n\n"], "is not JSON"),
    ([b'data: {"error": {"message": "oom"}}\n\n'], "the server stopped: oom; ask again"),
  ],
)
def test_failures_say_in_one_line_what_to_do(server, reply, said):
  server.script = [reply]
  with (
    Endpoint(server.url, "m", retries=2) as remote,
    pytest.raises(EndpointError, match=said) as caught,
  ):
    remote.generate(["x"])
  assert "\n" not in str(caught.value)


def test_a_stream_that_breaks_after_the_first_piece_is_not_told_twice(server):
  server.script = [stream(delta("abc"), end=False), chat("other")]
  told = []
  with (
    Endpoint(server.url, "m") as remote,
    pytest.raises(EndpointError, match=r"broke off after 3 characters.*ask again"),
  ):
    remote.generate([[{"role": "user", "content": "x"}]], callback=lambda *x: told.append(x))
  assert told == [(0, "abc")]


@pytest.mark.parametrize(
  ("reply", "said"),
  [
    ([0.4, b""], "ReadTimeout at http"),
    ([b": waiting\n", 0.07] * 4, "no whole answer from http.* in 0.1 s"),
  ],
  ids=["silent", "dripping"],
)
def test_a_server_that_is_too_slow_is_given_up(server, reply, said):
  server.script = [reply]
  with (
    Endpoint(server.url, "m", timeout_seconds=0.1, retries=1) as remote,
    pytest.raises(EndpointError, match=f"{said}.*gave up after 2 of 2 attempts; try later"),
  ):
    remote.generate(["x"])


def test_a_server_that_is_away_is_named(server):
  with (
    Endpoint("http://127.0.0.1:9", "m", retries=0) as remote,
    pytest.raises(EndpointError, match=r"ConnectError at http://127\.0\.0\.1:9"),
  ):
    remote.generate(["x"])


def test_the_first_failure_stops_the_others(server):
  def slow_or_refused(body):
    if body["prompt"] == "bad":
      return 400, {}, {"error": {"message": "no"}}
    time.sleep(0.2)
    return completion("x")

  server.script = [slow_or_refused]
  with (
    Endpoint(server.url, "m", concurrency=2) as remote,
    pytest.raises(EndpointError, match="400: no"),
  ):
    remote.generate(["bad", *["good"] * 20])
  assert len(server.requests) < 6


def test_no_more_requests_run_at_once_than_allowed(server):
  def slow(body):
    time.sleep(0.05)
    return completion(body["prompt"])

  server.script = [slow]
  prompts = [str(i) for i in range(9)]
  with Endpoint(server.url, "m", concurrency=3) as remote:
    assert [answer.text for answer in remote.generate(prompts)] == prompts
  assert server.most == 3


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"tokens_per_minute": 24}])
def test_rates_are_kept_over_any_window(server, monkeypatch, limits):
  monkeypatch.setattr(rate_limit, "_WINDOW", 0.3)
  server.script = [completion("x")]  # 10 tokens each
  with Endpoint(server.url, "m", concurrency=8, **limits) as remote:
    remote.generate(["abcd"] * 6, max_new_tokens=9)
  times = sorted(when for *_, when in server.requests)
  assert len(times) == 6
  assert all(third - first > 0.2 for first, third in zip(times, times[2:], strict=False))


def test_answers_are_recorded_and_replayed_without_a_server(server, tmp_path, monkeypatch):
  count = iter(range(100))
  server.script = [lambda body: completion(f"{body['prompt']}{next(count)}")]
  settings = {"cache": tmp_path / "answers", "concurrency": 1}
  prompts = ["a", "b", "a"]
  with Endpoint(server.url, "m", mode="record", **settings) as remote:
    first = remote.generate(prompts)
    again = remote.generate(prompts)
    told = []
    remote.generate(["b"], callback=lambda *x: told.append(x))
    assert remote.usage[:2] == (3, 4)
  assert [answer.text for answer in first] == ["a0", "b1", "a2"]
  assert first == again
  assert told == [(0, "b1")]
  monkeypatch.delenv("OPENAI_API_KEY")
  server.script = [(500, {}, {})]
  with Endpoint(server.url, "m", mode="replay", **settings) as remote:
    assert remote.generate(prompts) == first
    with pytest.raises(EndpointError, match=r"completion 0 has no recorded answer.*mode='record'"):
      remote.generate(["a"], temperature=0.5)
  assert len(server.requests) == 3


def test_a_damaged_record_is_noticed_and_made_again(server, tmp_path):
  server.script = [completion("x")]
  with Endpoint(server.url, "m", mode="record", cache=tmp_path) as remote:
    remote.generate(["a"])
    (record,) = tmp_path.iterdir()
    whole = record.read_text()
    record.write_text(whole.replace('"x"', '"y"'))
    with (
      Endpoint(server.url, "m", mode="replay", cache=tmp_path) as other,
      pytest.raises(EndpointError, match="checksum does not match; record it again"),
    ):
      other.generate(["a"])
    assert remote.generate(["a"])[0].text == "x"
    assert record.read_text() == whole


def test_the_key_is_told_to_nobody_but_the_server(server, tmp_path, caplog, monkeypatch):
  caplog.set_level(logging.DEBUG)
  said = [repr(remote := Endpoint(server.url, "m", mode="record", cache=tmp_path, retries=1))]

  def fails(*script, url=None, key=KEY):
    server.script = list(script)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises((EndpointError, ValueError)) as caught:
      (remote if url is None else Endpoint(url, "m", retries=0)).generate(["x"])
    said.extend([str(caught.value), "".join(traceback.format_exception(caught.value))])

  echo = {"error": {"message": f"who is {KEY}?"}}
  fails((401, {}, echo))
  fails((503, {}, echo))
  fails((200, {}, None))
  fails([f"data: {json.dumps(echo)}\n\n".encode()])
  fails({}, url="http://127.0.0.1:9")
  fails({}, key=f"{KEY}\n{KEY}")
  fails({}, key=f"{KEY}é")
  monkeypatch.setenv("OPENAI_API_KEY", KEY)
  server.script = [completion(f"your key is {KEY}")]
  (answer,) = remote.generate(["y"])
  said += [repr(answer), repr(vars(remote)), caplog.text]
  said += [path.name + path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
  assert answer.text == "your key is [API key]"
  assert len(list(tmp_path.iterdir())) == 1
  assert any(headers["Authorization"] == f"Bearer {KEY}" for _, headers, *_ in server.requests)
  assert not any(KEY in text for text in said)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"base_url": f"https://me:{KEY}@host/v1"}, "base_url must be http"),
    ({"base_url": f"https://host/v1?key={KEY}"}, "base_url must be http"),
    ({"base_url": "host/v1"}, "base_url must be http"),
    ({"mode": "rec"}, "mode is 'rec'; use one of off, record, replay"),
    ({"mode": "record"}, "mode 'record' with cache=None; give a folder"),
    ({"concurrency": 0}, "concurrency is 0; use at least 1"),
    ({"timeout_seconds": 0.0}, "timeout_seconds is 0.0; use a number above 0"),
    ({"requests_per_minute": -1.0}, "requests_per_minute is -1.0; use at least 1"),
  ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
  with pytest.raises(ValueError, match=said) as caught:
    Endpoint(**{"base_url": "https://host/v1", "model": "m", **settings})
  assert KEY not in str(caught.value)


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ({"stop": "x"}, "stop is 'x'; use a list of texts"),
    ({"keys": jax.random.split(jax.random.key(0), 2)}, "2 keys for 1 prompts; give one for each"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; use at least 1"),
    ({"temperature": float("nan")}, "cannot be sent as JSON"),
    ({"prompts": ["\ud800"]}, "cannot be sent as JSON"),
    ({}, "environment variable NO_SUCH_KEY holds no API key; export it, or pass api_key_env=None"),
  ],
)
def test_requests_that_cannot_be_sent_are_refused(server, arguments, said):
  with (
    Endpoint(server.url, "m", api_key_env="NO_SUCH_KEY") as remote,
    pytest.raises(ValueError, match=said) as caught,
  ):
    remote.generate(**{"prompts": ["a"], **arguments})
  assert "\n" not in str(caught.value)
  assert not server.requests
