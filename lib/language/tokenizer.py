"""Text to tokens and back, as the model's own files say: GGUF metadata or `tokenizer.json`.

The work is done by the `tokenizers` library. Two of its tokenizers stand behind each `Tokenizer`:
one that knows the control tokens (`<|im_end|>`), and one from which they are removed, so that text
can never become one of them. `encode` and the contents of `chat` go through the second.
"""

import json
import operator
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foliax.extras import require
from foliax.language import chat_template as templates
from foliax.language import gguf_tokenizer

# A model ends its turn with one of these, whichever of them its file calls `eos`.
_ENDS_OF_TURN = (
  "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
  "<|end_of_text|>", "</s>",
)  # fmt: skip
_BYTE_LEVEL_CHAT = (
  "{% for message in messages %}<bos>{{ message.role }}\n{{ message.content }}<eos>{% endfor %}"
  "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


class Tokenizer:
  """Tokens of one model.

  Control tokens are the added tokens of the file, special or not (`<|im_end|>`, `<think>`), except
  those of whitespace alone.

  Attributes:
    vocab_size: one more than the largest token.
    bos_id, eos_id: tokens that begin and end a text, or None.
    pad_id: token for padding: the file's own, else `eos_id`, else 0.
    stop_ids: tokens that end a turn, ascending.
    chat_template: the Jinja source, or None.
  """

  def __init__(
    self,
    backend: Any,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    pad_id: int | None = None,
    stop_ids: Iterable[int] = (),
    chat_template: str | None = None,
  ):
    """Wraps a tokenizer of the `tokenizers` library.

    Args:
      backend: a `tokenizers.Tokenizer`; its truncation and padding are switched off.
      bos_id, eos_id, pad_id: see the attributes.
      stop_ids: tokens that end a turn, besides `eos_id` and those known by name.
      chat_template: Jinja source, or None.
    """
    backend.no_truncation()
    backend.no_padding()
    self._backend = backend
    specification = json.loads(backend.to_str())
    added = {t["content"]: t for t in specification["added_tokens"] if t["content"].strip()}
    self._controls = {content.strip(): token["id"] for content, token in added.items()}
    self._pattern = _pattern(added)
    self._plain, self._continued = _without(specification, set(added))
    self._unknown = specification["model"].get("unk_token")
    self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    self.bos_id, self.eos_id, self.chat_template = bos_id, eos_id, chat_template
    self.pad_id = next((i for i in (pad_id, eos_id) if i is not None), 0)
    stops = {self._controls[name] for name in _ENDS_OF_TURN if name in self._controls}
    self.stop_ids = tuple(sorted(stops.union(stop_ids, () if eos_id is None else (eos_id,))))

  def __repr__(self) -> str:
    return f"Tokenizer({self.vocab_size} tokens, {len(self._controls)} of them control tokens)"

  def encode(self, text: str, special: bool = False) -> list[int]:
    """The tokens of a text, and nothing before or after them.

    Args:
      text: any text.
      special: whether control tokens written in the text become control tokens. Only for text that
        you wrote yourself.
    Returns:
      Tokens.
    Raises:
      ValueError: the text holds half a surrogate pair.
    """
    if special:
      return self._ids(self._backend, text)
    return self._text_ids(self._plain, text)

  def prompt(self, text: str) -> list[int]:
    """The tokens of a text with what the model expects around it, such as a token that begins it.

    Control tokens written in the text stay text.

    Args:
      text: any text.
    Returns:
      Tokens.
    Raises:
      ValueError: the text holds half a surrogate pair.
    """
    return self._text_ids(self._plain, text, around=True)

  def decode(self, ids: Iterable[int], special: bool = False) -> str:
    """The text of tokens; bytes that are not UTF-8 become U+FFFD.

    Args:
      ids: tokens. One that the vocabulary lacks, as models with a padded vocabulary can sample, has
        no text.
      special: whether to write special tokens too.
    Returns:
      The text.
    Raises:
      ValueError: a token is negative.
    """
    tokens = [operator.index(token) for token in ids]
    if any(token < 0 for token in tokens):
      raise ValueError(
        f"token {min(tokens)} is negative; use tokens from 0 to {self.vocab_size - 1}"
      )
    return self._backend.decode(
      [token for token in tokens if token < self.vocab_size], skip_special_tokens=not special
    )

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> list[int]:
    """The tokens of a conversation, by the model's chat template.

    Only the template makes control tokens: those in contents, tools and `variables` stay text. A
    template that parses contents (Qwen3 cuts `<think>…</think>` out of earlier answers) does so as
    long as that leaves its own control tokens the same; see `chat_template.render`.

    Args:
      messages: dictionaries with `role` and `content`, and what else the template knows.
      add_generation_prompt: whether to begin the assistant's turn at the end.
      variables: further variables of the template, such as `tools` or `enable_thinking`.
    Returns:
      Tokens.
    Raises:
      ValueError: no template, messages of another form, or the template refuses them.
    """
    if self.chat_template is None:
      raise ValueError(
        "this tokenizer has no chat template; set chat_template, or use prompt(text)"
      )
    named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
    trusted = {
      name: "" if token is None else self._backend.id_to_token(token) or ""
      for name, token in named.items()
    }
    text, spans = templates.render(
      self.chat_template,
      messages,
      self._pattern,
      tuple(self._controls),
      {**trusted, "add_generation_prompt": add_generation_prompt},
      variables,
    )
    ids: list[int] = []
    end = 0
    for begin, after in spans:
      ids += self._segment(text[end:begin], first=end == 0)
      ids.append(self._controls[text[begin:after].strip()])
      end = after
    return ids + self._segment(text[end:], first=end == 0)

  def _segment(self, text: str, first: bool) -> list[int]:
    return self._text_ids(self._plain if first else self._continued, text) if text else []

  def _text_ids(self, backend: Any, text: str, around: bool = False) -> list[int]:
    ids = self._ids(backend, text)
    for name, control in self._controls.items():
      if name != self._unknown and name in text and control in ids:
        raise ValueError(f"the model of this tokenizer makes {name!r} from text; leave it out")
    return self._ids(backend, text, around) if around else ids

  def _ids(self, backend: Any, text: str, around: bool = False) -> list[int]:
    if half := re.search("[\ud800-\udfff]", text):
      raise ValueError(
        f"text holds half a surrogate pair at character {half.start()}; remove it, or decode the "
        "text with errors='replace'"
      )
    return backend.encode(text, add_special_tokens=around).ids


class StreamDecoder:
  """Text of tokens that come one at a time, in whole characters.

  What all `push` and the last `flush` return, one after the other, is `decode` of all tokens.
  """

  def __init__(self, tokenizer: Tokenizer, special: bool = False):
    """Starts with no tokens.

    Args:
      tokenizer: of the tokens.
      special: whether to write special tokens too.
    """
    self._tokenizer, self._special = tokenizer, special
    self._ids: list[int] = []
    self._done = 0  # these of `_ids` are written; they stay as what the next ones are decoded after

  def push(self, token: int) -> str:
    """Takes the next token.

    Args:
      token: the token.
    Returns:
      The text that is now certain; empty while a character is incomplete.
    """
    self._ids.append(token)
    return self._take(whole=True)

  def flush(self) -> str:
    """The rest, with U+FFFD for a character that stayed incomplete; starts anew."""
    rest = self._take(whole=False)
    self._ids, self._done = [], 0
    return rest

  def _take(self, whole: bool) -> str:
    before = self._tokenizer.decode(self._ids[: self._done], self._special)
    text = self._tokenizer.decode(self._ids, self._special)
    if len(text) <= len(before) or (whole and text.endswith("\ufffd")):
      return ""
    self._ids = self._ids[self._done :]
    self._done = len(self._ids)
    return text[len(before) :]


def _pattern(added: Mapping[str, Mapping[str, Any]]) -> re.Pattern[str]:
  """Matches any control token, the longest first, with the whitespace that it swallows."""
  alternatives = [
    (r"\s*" if token["lstrip"] else "")
    + re.escape(content.strip())
    + (r"\s*" if token["rstrip"] else "")
    for content, token in sorted(added.items(), key=lambda item: -len(item[0]))
  ]
  return re.compile("|".join(alternatives) or r"(?!)")


def _without(specification: dict[str, Any], controls: set[str]) -> tuple[Any, Any]:
  """The tokenizer without control tokens: for the beginning of a text, and for what follows one."""
  tokenizers = require("tokenizers", "language")
  kept = [t for t in specification["added_tokens"] if t["content"] not in controls]
  specification = {**specification, "added_tokens": kept}
  model = specification["model"]
  if model.get("type") == "BPE":
    gone = controls - {model.get("unk_token")}
    merges = [merge for merge in model["merges"] if gone.isdisjoint((*merge, "".join(merge)))]
    vocabulary = {token: index for token, index in model["vocab"].items() if token not in gone}
    specification["model"] = {**model, "vocab": vocabulary, "merges": merges}
  text = json.dumps(specification)
  beginning = tokenizers.Tokenizer.from_str(text)
  continued = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
  return beginning, beginning if continued == text else tokenizers.Tokenizer.from_str(continued)


def byte_level() -> Tokenizer:
  """One token for each byte, of its value; then `<bos>` 256, `<eos>` 257, `<pad>` 258.

  For tiny models. Its chat template writes `<bos>role\\ncontent<eos>` for each message.
  """
  tokenizers = require("tokenizers", "language")
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab={c: b for b, c in enumerate(_byte_characters())}, merges=[])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<bos>", "<eos>", "<pad>"])
  return Tokenizer(backend, bos_id=256, eos_id=257, pad_id=258, chat_template=_BYTE_LEVEL_CHAT)


def _byte_characters() -> list[str]:
  """The printable character that byte-level BPE writes for each byte (Radford et al. 2019)."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def load(path: str | os.PathLike) -> Tokenizer:
  """The tokenizer that belongs to the weights at `path`: what `weights.load` takes.

  Args:
    path: a `.gguf` file, or a model's directory.
  Returns:
    The tokenizer.
  Raises:
    ValueError: a file is malformed, or describes a tokenizer of another kind.
    FileNotFoundError: there is no such file, or the directory holds no `tokenizer.json`.
  """
  return from_directory(path) if pathlib.Path(path).is_dir() else from_gguf(path)


def from_gguf(path: str | os.PathLike) -> Tokenizer:
  """The tokenizer of a GGUF file.

  Args:
    path: the file.
  Returns:
    The tokenizer, with the chat template of the file.
  Raises:
    ValueError: the file is malformed, or its tokenizer is not byte-level BPE of a known kind.
  """
  from foliax.language import weights

  return from_metadata(weights.gguf_metadata(path), name=os.fspath(path))


def from_metadata(metadata: Mapping[str, Any], name: str = "metadata") -> Tokenizer:
  """The tokenizer that metadata of a GGUF file describes.

  Args:
    metadata: values by key: `tokenizer.ggml.model`, `.pre`, `.tokens`, `.merges`, `.token_type`,
      `.bos_token_id`…, and `tokenizer.chat_template`.
    name: what errors call the source.
  Returns:
    The tokenizer.
  Raises:
    ValueError: something is missing, malformed or of an unknown kind.
  """
  backend, settings = gguf_tokenizer.build(metadata, name)
  return Tokenizer(backend, **settings)


def from_file(path: str | os.PathLike) -> Tokenizer:
  """The tokenizer of a `tokenizer.json`, which knows neither chat template nor roles of tokens.

  Args:
    path: the file.
  Returns:
    The tokenizer; `bos_id` and `eos_id` are None.
  Raises:
    ValueError: the file is malformed.
    OSError: the file cannot be read.
  """
  return Tokenizer(_read(path))


def _read(path: str | os.PathLike) -> Any:
  tokenizers = require("tokenizers", "language")
  content = pathlib.Path(path).read_bytes()
  try:
    return tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # the library raises nothing more specific
    raise ValueError(
      f"{path} is not a tokenizer.json: {' '.join(str(error).split())}; fetch it again"
    ) from None


def from_directory(directory: str | os.PathLike) -> Tokenizer:
  """The tokenizer of a model's directory, with its control tokens and chat template.

  Args:
    directory: holds `tokenizer.json`, and if the model has them `tokenizer_config.json`,
      `special_tokens_map.json`, `generation_config.json` and `chat_template.jinja`.
  Returns:
    The tokenizer.
  Raises:
    ValueError: a file is malformed.
    FileNotFoundError: there is no `tokenizer.json`.
  """
  folder = pathlib.Path(directory)
  if not (folder / "tokenizer.json").is_file():
    raise FileNotFoundError(f"{folder} holds no tokenizer.json; name a directory that does")
  config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    named = {entry.get("name"): entry.get("template") for entry in template}
    template = named.get("default")
  if (folder / "chat_template.jinja").is_file():
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
  backend = _read(folder / "tokenizer.json")
  ids = {}
  for key in ("bos", "eos", "pad"):
    token = config.get(f"{key}_token")
    content = token.get("content") if isinstance(token, dict) else token
    ids[f"{key}_id"] = None if content is None else backend.token_to_id(content)
  ends = _json(folder / "generation_config.json").get("eos_token_id", [])
  return Tokenizer(
    backend,
    **ids,
    stop_ids=[ends] if isinstance(ends, int) else ends,
    chat_template=template,
  )


def _json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file; empty if there is no such file."""
  try:
    value = json.loads(path.read_bytes())
  except FileNotFoundError:
    return {}
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}; fetch it again") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} must hold a JSON object; fetch it again")
  return value
