"""Chat templates: Jinja programs that come with a model and turn messages into its prompt.

A template is a program of somebody else, so it runs in jinja2's sandbox. What it renders mixes text
of its own, where `<|im_end|>` ends a turn, with contents written by anyone, where the same letters
must stay letters. The rendered string alone does not say which is which; `render` does: it renders
a second time with the characters that begin and end control tokens replaced, in the contents, by
characters that occur nowhere else. Control tokens that are still there came from the template.
"""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foliax.extras import require


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
  """The template as transformers would compile it: same whitespace rules, functions and tags."""
  sandbox = require("jinja2.sandbox", "language")
  extension: Any = require("jinja2.ext", "language").Extension
  exceptions = require("jinja2.exceptions", "language")

  class Generation(extension):
    """`{% generation %}` marks text of the assistant for training; it changes nothing here."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def raise_exception(message: str) -> None:
    raise exceptions.TemplateError(message)

  def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
  ) -> str:  # jinja2's own escapes HTML
    return json.dumps(
      value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  try:
    return environment.from_string(source)
  except exceptions.TemplateSyntaxError as error:
    raise ValueError(
      f"chat template, line {error.lineno}: {_one_line(error)}; give the tokenizer a valid one"
    ) from None


def _one_line(error: object) -> str:
  return " ".join(str(error).split())


def _plain(value: Any, name: str) -> Any:
  """A copy of plain JSON types only: objects could have methods that a template may call."""
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, Mapping):
    return {_plain(key, name): _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, str | bytes):
    return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
  raise ValueError(
    f"{name} is a {type(value).__name__}; use strings, numbers, lists and dictionaries"
  )


def _messages(messages: Any) -> list[dict[str, Any]]:
  if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
    raise ValueError(
      f"messages must be a non-empty list of {{'role': …, 'content': …}}, not {messages!r:.80}"
    )
  checked = []
  for index, message in enumerate(messages):
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][\w-]*", role):
      raise ValueError(
        f"messages[{index}] has role {role!r:.80}; use a word such as system, user or assistant"
      )
    # A key without a value means the same as no key, but templates would print "None".
    present = {key: value for key, value in message.items() if value is not None}
    checked.append(_plain(present, f"messages[{index}]"))
  return checked


def _strings(value: Any) -> list[str]:
  if isinstance(value, str):
    return [value]
  parts = [*value, *value.values()] if isinstance(value, dict) else value
  return [text for part in parts for text in _strings(part)] if isinstance(parts, list) else []


def _translated(value: Any, table: dict[int, str]) -> Any:
  """Every string of `value` translated, but for keys that are names."""
  if isinstance(value, str):
    return value.translate(table)
  if isinstance(value, dict):
    return {
      key if not isinstance(key, str) or key.isidentifier() else key.translate(table): _translated(
        item, table
      )
      for key, item in value.items()
    }
  return [_translated(item, table) for item in value] if isinstance(value, list) else value


def _edges(controls: Sequence[str]) -> str:
  """Characters without one of which no control token can be written."""
  edges: set[str] = set()
  for token in controls:
    marks = [character for character in token if not character.isalnum()]
    edges |= {marks[0], marks[-1]} if marks else {token[0].lower(), token[0].upper()}
  return "".join(sorted(edges))


def render(
  source: str,
  messages: Sequence[Mapping[str, Any]],
  pattern: re.Pattern[str],
  controls: Sequence[str],
  trusted: Mapping[str, Any],
  variables: Mapping[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
  """What the template makes of the messages, and where its own control tokens are.

  Templates may trim, cut or compare contents: the text is then what the template makes of the
  contents as they are, as long as its own control tokens are the same as without those in contents.
  Where they are not (a content talks the template into writing or leaving out a turn), the template
  sees the contents with the edges of control tokens hidden, and treats them as opaque text.

  Args:
    source: the template.
    messages: dictionaries with `role` (a word, trusted) and contents, which nobody need trust.
    pattern: matches any control token.
    controls: the control tokens.
    trusted: further variables of the template whose strings may be control tokens.
    variables: further variables of the template that are treated like contents.
  Returns:
    The text, and (begin, end) of each match of `pattern` that the template wrote.
  Raises:
    ValueError: messages of another form, or the template refuses them or fails.
  """
  contents = {"messages": _messages(messages), **_plain(variables, "variables")}
  edges = _edges(controls)
  seen = set(source).union(*_strings(contents), *_strings(_plain(trusted, "trusted")))
  unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in seen)
  hide = dict(zip(map(ord, edges), itertools.islice(unused, len(edges)), strict=True))
  restore = {ord(stand_in): chr(code) for code, stand_in in hide.items()}

  template = _compiled(source)
  exceptions = require("jinja2.exceptions", "language")

  def rendered(values: dict[str, Any]) -> str:
    try:
      return template.render(**trusted, **values)
    except (exceptions.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
      raise ValueError(f"the chat template refused the messages: {_one_line(error)}") from None

  def matches(text: str) -> list[re.Match[str]]:
    return list(pattern.finditer(text))

  text, hidden = rendered(contents), rendered(_translated(contents, hide))
  own = matches(hidden)
  opaque = hidden.translate(restore)
  if text != opaque:
    found = matches(text)
    if [match.group() for match in found] == [match.group() for match in own]:
      return text, [match.span() for match in found]
  return opaque, [match.span() for match in own]
