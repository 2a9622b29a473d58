"""The chat answers, forgets what no longer fits, and stops when told."""

import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import jax
import pytest
from foliax.experiments import chat, cli
from foliax.experiments.registry import UserError
from foliax.language import generate, model, tokenizer, weights

TINY = model.Config(
  vocab_size=259,
  hidden_size=16,
  layers=1,
  heads=2,
  kv_heads=1,
  head_dim=8,
  ffn_size=32,
  context=128,
)


@dataclasses.dataclass
class Parrot:
  """Answers with pieces; an exception among them is raised."""

  pieces: list
  asked: list = dataclasses.field(default_factory=list)
  reason: str = "stop"

  def generate(self, prompts, callback, **options):
    self.asked.append((prompts, options))
    for piece in self.pieces:
      if isinstance(piece, BaseException):
        raise piece
      callback(0, piece)
    return [generate.Completion("".join(self.pieces), [], [], self.reason)]


def make(parrot, context=200, **options):
  return chat.Chat(parrot, tokenizer.byte_level(), context, **{"max_tokens": 50, **options})


def talk(monkeypatch, made, *lines, **arguments):
  """Runs the command on lines of input, with `made` in place of the model."""
  monkeypatch.setattr(chat, "load", lambda model, **_: made)
  monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
  return cli.main(["chat", "smollm2", *(f"--{key}={value}" for key, value in arguments.items())])


def test_answers_stream_and_the_conversation_goes_on(monkeypatch, capsys):
  parrot = Parrot(["Hel", "lo \x1b[2J"])
  made = make(parrot, system="Be kind.", temperature=0.5)
  assert talk(monkeypatch, made, "hi", "", "  more ") == 0
  out, err = capsys.readouterr()
  assert out == "Hello \ufffd[2J\n" * 2  # a model cannot clear the screen
  assert err.count("tokens/s]") == 2
  said = {"role": "assistant", "content": "Hello \x1b[2J"}
  system, hi = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}
  (first, options), (second, later) = parrot.asked
  assert first == [[system, hi]]
  assert second == [[system, hi, said, {"role": "user", "content": "more"}]]
  assert (options["temperature"], options["max_new_tokens"]) == (0.5, 50)
  assert (
    jax.random.key_data(options["keys"]).tolist() != jax.random.key_data(later["keys"]).tolist()
  )


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(monkeypatch, capsys):
  parrot = Parrot(["x" * 20])
  made = make(parrot, context=250, system="Keep me.")
  talk(monkeypatch, made, *["q" * 20] * 6)
  err = capsys.readouterr().err
  assert err.count("[the context is full: the 2 oldest messages are forgotten]") == 3
  lengths = [len(made._tokenizer.chat(prompts[0])) for prompts, _ in parrot.asked]
  assert max(lengths) <= 200
  assert all(prompts[0][0]["content"] == "Keep me." for prompts, _ in parrot.asked)
  assert [len(prompts[0]) for prompts, _ in parrot.asked] == [2, 4, 6, 6, 6, 6]


def test_a_question_that_cannot_be_asked_leaves_the_conversation_as_it_was(monkeypatch, capsys):
  made = make(Parrot(["yes"]))
  assert talk(monkeypatch, made, "one", "x" * 300, "\ud800", "two") == 0
  out, err = capsys.readouterr()
  assert out == "yes\nyes\n"
  assert "foliax: the question takes 318 tokens, and there is room for 150; shorten it" in err
  assert "foliax: text holds half a surrogate pair" in err
  assert [message["content"] for message in made.messages] == ["one", "yes", "two", "yes"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
  parrot = Parrot(["par", KeyboardInterrupt()])
  made = make(parrot)
  assert talk(monkeypatch, made, "one") == 0
  assert "[3 tokens," in (err := capsys.readouterr().err)
  assert ", stopped]" in err
  assert [message["content"] for message in made.messages] == ["one", "par"]
  parrot.pieces = [KeyboardInterrupt()]
  assert talk(monkeypatch, made, "two") == 0
  assert len(made.messages) == 2  # without an answer the question is forgotten


def test_one_question_is_answered_with_an_exit_code(monkeypatch, capsys):
  assert talk(monkeypatch, make(Parrot(["4"], reason="length")), once="2+2?") == 0
  out, err = capsys.readouterr()
  assert out == "4\n"
  assert ", cut at --max-tokens]" in err
  assert talk(monkeypatch, make(Parrot(["par", KeyboardInterrupt()])), once="x") == 130
  assert talk(monkeypatch, make(Parrot([])), once="x" * 300) == 2


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"temperature": -1.0}, "--temperature is -1.0; it must be 0 or more"),
    ({"temperature": float("nan")}, "--temperature is nan"),
    ({"max_tokens": 200}, "--max-tokens is 200; it must be from 1 to 199"),
    ({"seed": -1}, "--seed is -1; it must be from 0"),
  ],
)
def test_options_out_of_range_are_refused(options, said):
  with pytest.raises(UserError, match=said):
    make(Parrot([]), **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """A tiny model as a directory of safetensors."""
  folder = tmp_path_factory.mktemp("tiny")
  weights.save(folder, model.init(jax.random.key(0), TINY), TINY)
  made = tokenizer.byte_level()
  made._backend.save(str(folder / "tokenizer.json"))
  config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": made.chat_template}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


def test_a_directory_of_safetensors_chats(directory, capsys):
  command = ["chat", str(directory), "--once=hi", "--max-tokens=9", "--temperature=1"]
  assert cli.main([*command, "--seed=1"]) == 0
  first = capsys.readouterr()
  assert first.out.strip()
  assert "tokens/s" in first.err
  assert cli.main([*command, "--seed=1"]) == 0
  assert capsys.readouterr().out == first.out
  assert cli.main([*command, "--seed=2"]) == 0
  assert capsys.readouterr().out != first.out


def test_models_that_are_not_there_are_named(tmp_path, capsys):
  assert cli.main(["chat", "gpt-9"]) == 2
  assert "there is no model and no file 'gpt-9'; use one of" in capsys.readouterr().err
  (tmp_path / "broken.gguf").write_bytes(b"GGUF")
  assert cli.main(["chat", str(tmp_path / "broken.gguf")]) == 2
  assert "broken.gguf has 4 bytes" in capsys.readouterr().err
  assert cli.main(["chat", str(tmp_path)]) == 2
  assert "holds no tokenizer.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dumb_terminal_is_enough(directory):
  ours, theirs = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, "-m", "foliax.experiments.cli", "chat", str(directory), "--max-tokens=60"],
    stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    env=os.environ | {"TERM": "dumb", "LC_ALL": "C", "PYTHONUTF8": "0"},
  )  # fmt: skip
  os.close(theirs)
  seen = b""

  def until(text, signals=0):
    """Reads until `text` ends what is seen, after signals a second apart."""
    nonlocal seen
    end = time.monotonic() + 120
    while not seen.endswith(text) and time.monotonic() < end:
      if select.select([ours], [], [], 1.0)[0]:
        seen += os.read(ours, 4096)
      elif signals:
        process.send_signal(signal.SIGINT)
    assert seen.endswith(text), seen

  try:
    until(b"leaves]\r\n> ")
    os.write(ours, b"hi\n")
    until(b"--max-tokens]\r\n> ")
    seen += b"|"
    until(b"\r\n> ", signals=1)  # Ctrl-C at the prompt: a new prompt
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.wait(60) == 0
    assert b"Traceback" not in seen
    assert b"\x1b" not in seen
  finally:
    process.kill()
    process.wait()
    os.close(ours)


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france(capfd):
  command = ["chat", "smollm2", "--once=What is the capital of France?", "--max-tokens=32"]
  assert cli.main(command) == 0
  assert capfd.readouterr().out == "The capital of France is Paris.\n"
