"""Byte-level BPE of the `tokenizers` library from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

from foliax.extras import require

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_DIGITS_SINGLY = "smollm"
# How text is cut into words before merges, by tokenizer.ggml.pre. None: the rule of GPT-2.
# Sources: Radford et al. 2019 (GPT-2); tokenizer.json of SmolLM2, Llama 3 and Qwen2.
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = {
  "default": None,
  "gpt-2": None,
  _DIGITS_SINGLY: None,
  "llama-bpe": _LLAMA3,
  "llama3": _LLAMA3,
  "llama-v3": _LLAMA3,
  "qwen2": _QWEN2,
  "deepseek-r1-qwen": _QWEN2,
}


def build(metadata: Mapping[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
  """The tokenizer that the metadata describes.

  Args:
    metadata: values by key.
    name: what errors call the source.
  Returns:
    A `tokenizers.Tokenizer`, and the other keyword arguments of `foliax.language.Tokenizer`.
  Raises:
    ValueError: something is missing, malformed or of an unknown kind.
  """
  tokenizers = require("tokenizers", "language")
  get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
  if get("model") != "gpt2":
    raise ValueError(
      f"{name}: tokenizer.ggml.model is {get('model')!r}; only byte-level BPE ('gpt2') is read "
      "from GGUF; load the model's tokenizer.json instead"
    )
  tokens, merges = _texts(get("tokens"), "tokens", name), _texts(get("merges"), "merges", name)
  if len(vocabulary := {token: index for index, token in enumerate(tokens)}) < len(tokens):
    twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
    raise ValueError(f"{name}: tokenizer.ggml.tokens holds {twice!r} twice; convert the file again")
  kinds = get("token_type") or [1] * len(tokens)
  if not isinstance(kinds, Sequence) or len(kinds) != len(tokens):
    raise ValueError(
      f"{name}: tokenizer.ggml.token_type must be a list of {len(tokens)} numbers, one for each "
      "token; convert the file again"
    )
  ids = {key: get(f"{key}_token_id") for key in ("bos", "eos", "padding", "unknown", "eot", "eom")}
  for key, token in ids.items():
    if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
      raise ValueError(
        f"{name}: tokenizer.ggml.{key}_token_id is {token!r}; it must be below {len(tokens)}, the "
        "number of tokens; convert the file again"
      )
  named = set(ids.values())
  special = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN) or i in named]
  backend = _byte_pairs(vocabulary, merges, get("pre", "default"), name)
  added = tokenizers.AddedToken
  backend.add_special_tokens([added(tokens[i], normalized=False, special=True) for i in special])
  backend.add_tokens(
    [added(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == _USER_DEFINED]
  )
  _surround(
    backend,
    tokens,
    before=ids["bos"] if get("add_bos_token") else None,
    after=ids["eos"] if get("add_eos_token") else None,
  )
  template = metadata.get("tokenizer.chat_template")
  return backend, {
    "bos_id": ids["bos"],
    "eos_id": ids["eos"],
    "pad_id": ids["padding"],
    "stop_ids": [ids[key] for key in ("eot", "eom") if ids[key] is not None],
    "chat_template": template if isinstance(template, str) else None,
  }


def _texts(values: Any, key: str, name: str) -> list[str]:
  if not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
    raise ValueError(
      f"{name}: tokenizer.ggml.{key} must be a list of texts; convert the file again"
    )
  return list(values)


def _byte_pairs(vocabulary: dict[str, int], merges: list[str], kind: Any, name: str) -> Any:
  """Byte-level BPE that cuts words as `kind` says."""
  tokenizers = require("tokenizers", "language")
  if kind not in _WORDS:
    raise ValueError(
      f"{name}: unknown pre-tokenizer tokenizer.ggml.pre {kind!r}; known are {', '.join(_WORDS)}; "
      "load the model's tokenizer.json instead"
    )
  pairs = [tuple(merge.split(" ")) for merge in merges]
  for merge, pair in zip(merges, pairs, strict=True):
    if len(pair) != 2:
      raise ValueError(
        f"{name}: tokenizer.ggml.merges holds {merge!r}, which is not two tokens; convert the file "
        "again"
      )
  words = _WORDS[kind]
  try:
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    model = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=words == _LLAMA3)
  except Exception as error:  # the library raises nothing more specific
    raise ValueError(
      f"{name}: tokenizer.ggml.merges do not fit the tokens ({error}); convert the file again"
    ) from None
  backend = tokenizers.Tokenizer(model)
  cut = tokenizers.pre_tokenizers
  steps = [cut.ByteLevel(False, use_regex=words is None)]
  if words is not None:
    steps.insert(0, cut.Split(tokenizers.Regex(words), "isolated"))
  if kind == _DIGITS_SINGLY:
    steps.insert(0, cut.Digits(individual_digits=True))
  backend.pre_tokenizer = cut.Sequence(steps)
  backend.decoder = tokenizers.decoders.ByteLevel()
  if words == _QWEN2:
    backend.normalizer = tokenizers.normalizers.NFC()
  return backend


def _surround(backend: Any, tokens: list[str], before: int | None, after: int | None) -> None:
  """Has `backend` put these tokens before and after a text."""
  around = {name: i for name, i in (("before", before), ("after", after)) if i is not None}
  if around:
    backend.post_processor = require("tokenizers", "language").processors.TemplateProcessing(
      single=[name for name in ("before", "$A", "after") if name == "$A" or name in around],
      special_tokens=[
        {"id": name, "ids": [token], "tokens": [tokens[token]]} for name, token in around.items()
      ],
    )
