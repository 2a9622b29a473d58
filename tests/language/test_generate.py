"""Generation: independent rows, true log-probabilities, exact caches, texts cut where they stop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.language import decode, model
from foliax.language.generate import Generator, generate, pad, right_padded, score
from foliax.language.sampling import log_distribution, sampling
from foliax.language.tokenizer import byte_level

CONFIG = model.Config(
  vocab_size=259, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=32,
  context=1100, tied=False,
)  # fmt: skip


def random_params():
  """Larger matrices than at the usual start, so that distributions differ from uniform."""
  rng = np.random.default_rng(0)
  params = jax.tree.map_with_path(
    lambda path, x: jnp.array(
      np.ones(x.shape) if path[-1].key.endswith("norm") else 0.2 * rng.normal(size=x.shape), x.dtype
    ),
    model.shapes(CONFIG),
  )
  return params | {"head": 4 * params["head"]}


PARAMS = random_params()
PROMPTS = [[1, 2, 3], [250], [7] * 20, [5, 9, 5, 9, 5]]
KEYS = jax.random.split(jax.random.key(1), 4)
run = functools.partial(generate, PARAMS, CONFIG, max_new_tokens=12)
log_probs_of = jax.jit(functools.partial(score, PARAMS, CONFIG))
uncached = jax.jit(lambda tokens: model.forward(PARAMS, CONFIG, tokens)[0])


def rows_of(result):
  return [np.asarray(result.tokens[i, :n]).tolist() for i, n in enumerate(result.lengths)]


@functools.cache
def base():
  return run(*pad(PROMPTS), KEYS)


def whole(result):
  """Prompts and continuations, in a shape that all tests share."""
  rows = [p + t for p, t in zip(PROMPTS, rows_of(result), strict=True)]
  tokens, lengths = pad([*rows, [0] * 32])
  return tokens[:4], lengths[:4]


def test_greedy_is_the_argmax_of_the_uncached_model():
  result = run(*pad(PROMPTS), KEYS, temperature=0.0)
  best = uncached(whole(result)[0]).argmax(-1)
  for i, (prompt, tokens) in enumerate(zip(PROMPTS, rows_of(result), strict=True)):
    assert tokens == best[i, len(prompt) - 1 :][:12].tolist()
  assert (result.sample_log_probs == 0).all()


def test_rows_do_not_depend_on_order_number_or_length_of_the_others():
  result = base()
  for order in ([2, 0, 3, 1], [1], [3, 3, 3, 2]):
    other = run(*pad([PROMPTS[i] for i in order]), KEYS[np.array(order)])
    for place, i in enumerate(order):
      assert rows_of(other)[place] == rows_of(result)[i]
      np.testing.assert_allclose(other.log_probs[place], result.log_probs[i], atol=1e-5)


def test_padding_is_never_seen():
  prompts, lengths = pad(PROMPTS)
  junk = jnp.where(jnp.arange(20) < lengths[:, None], prompts, 200)
  assert rows_of(run(junk, lengths, KEYS)) == rows_of(base())
  wide = jnp.pad(junk, ((0, 0), (0, 40)), constant_values=77)
  assert rows_of(run(wide, lengths, KEYS)) == rows_of(base())


def test_left_padded_prompts_say_the_same():
  left = jnp.array([[0] * (20 - len(row)) + row for row in PROMPTS])
  lengths = jnp.array([len(row) for row in PROMPTS])
  assert rows_of(run(right_padded(left, lengths), lengths, KEYS)) == rows_of(base())


def test_another_key_says_something_else_and_only_in_its_row():
  other = run(*pad(PROMPTS), KEYS.at[1].set(jax.random.key(99)))
  assert [a == b for a, b in zip(rows_of(other), rows_of(base()), strict=True)] == [1, 0, 1, 1]


def test_sampling_options_are_per_row():
  mixed = run(*pad(PROMPTS), KEYS, temperature=jnp.array([1.0, 0.0, 1.0, 1.0]))
  cold = run(*pad(PROMPTS), KEYS, temperature=0.0)
  assert rows_of(mixed) == [rows_of(cold if i == 1 else base())[i] for i in range(4)]


def test_several_keys_continue_each_prompt():
  result = run(*pad(PROMPTS[2:]), KEYS[jnp.array([0, 2, 3, 1])])
  assert rows_of(result)[1:3] == rows_of(base())[2:]
  assert rows_of(result)[0] != rows_of(result)[1]


def test_score_recovers_the_recorded_log_probs():
  result = run(*pad(PROMPTS), KEYS, temperature=0.7, top_p=0.9)
  scores = log_probs_of(*whole(result))
  for i, prompt in enumerate(PROMPTS):
    n = int(result.lengths[i])
    np.testing.assert_allclose(
      scores[i, len(prompt) : len(prompt) + n], result.log_probs[i, :n], atol=1e-4
    )
    assert scores[i, 0] == 0
    assert (scores[i, len(prompt) + n :] == 0).all()


def test_sample_log_probs_are_of_the_distribution_drawn_from():
  options = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
  result = run(*pad(PROMPTS), KEYS, **options)
  logits = uncached(whole(result)[0])
  first = jnp.stack([logits[i, len(p) - 1] for i, p in enumerate(PROMPTS)])
  expected = jax.jit(log_distribution)(first, sampling(4, **options))
  for i in range(4):
    np.testing.assert_allclose(
      result.sample_log_probs[i, 0], expected[i, result.tokens[i, 0]], atol=1e-4
    )


@pytest.mark.slow
def test_score_has_the_gradient_of_the_whole_log_softmax():
  tokens, lengths = pad([[1, 2, 3, 4], [9, 8]])

  def plain(params):
    logits = jax.nn.log_softmax(model.forward(params, CONFIG, tokens)[0])
    return logits[0, 0, 2] + logits[0, 1, 3] + logits[0, 2, 4] + logits[1, 0, 8]

  ours = jax.grad(lambda params: score(params, CONFIG, tokens, lengths).sum())(PARAMS)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.grad(plain)(PARAMS)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_stop_token_ends_its_row_and_is_part_of_it():
  rows = rows_of(base())
  stop = rows[2][4]
  result = run(*pad(PROMPTS), KEYS, stop_ids=(stop, 255))
  for i, row in enumerate(rows_of(result)):
    expected = next((n + 1 for n, t in enumerate(rows[i]) if t in (stop, 255)), 12)
    assert row == rows[i][:expected]
    assert bool(result.stopped[i]) == (row[-1] in (stop, 255))
    assert (result.tokens[i, expected:] == 0).all()
    assert (result.log_probs[i, expected:] == 0).all()


def test_loop_ends_when_all_rows_have_stopped():
  seen = []
  firsts = {row[0] for row in rows_of(base())}
  run(*pad(PROMPTS), KEYS, stop_ids=tuple(firsts), callback=seen.append, chunk=4)
  assert [len(new) for new in seen[0]] == [1] * 4
  assert len(seen) == 1


def test_callback_gets_each_token_once_and_changes_nothing():
  seen = [[] for _ in PROMPTS]

  def callback(new):
    for row, tokens in zip(seen, new, strict=True):
      row.extend(tokens.tolist())

  result = run(*pad(PROMPTS), KEYS, callback=callback, chunk=5)
  assert seen == rows_of(result) == rows_of(base())


def test_callback_ends_rows():
  result = run(*pad(PROMPTS), KEYS, callback=lambda new: [True, False, False, True], chunk=5)
  assert result.lengths.tolist() == [5, 12, 12, 5]
  assert result.stopped.tolist() == [True, False, False, True]
  assert rows_of(result) == [
    row[:n] for row, n in zip(rows_of(base()), [5, 12, 12, 5], strict=True)
  ]


def test_cache_is_taken_up_again():
  first = run(*pad(PROMPTS), KEYS, cache=model.init_cache(PARAMS, CONFIG, 4, 64))
  more = [[row[-1], 4, 2] for row in rows_of(first)]
  again = run(*pad(more), KEYS, cache=first.cache)
  texts = [p + t + m[1:] for p, t, m in zip(PROMPTS, rows_of(first), more, strict=True)]
  assert rows_of(again) == rows_of(run(*pad(texts), KEYS))


def test_rolled_back_cache_is_as_if_never_gone_there():
  first = run(*pad(PROMPTS), KEYS)
  ends = jnp.array([len(p) - 1 for p in PROMPTS])
  last = [[p[-1]] for p in PROMPTS]
  again = run(*pad(last), KEYS, cache=model.rollback(first.cache, ends))
  assert rows_of(again) == rows_of(base())
  np.testing.assert_allclose(again.log_probs, base().log_probs, atol=1e-5)


def test_long_prompts_go_in_parts(monkeypatch):
  long = [np.random.default_rng(0).integers(0, 259, 50).tolist(), *PROMPTS[1:]]
  expected = run(*pad(long), KEYS)
  monkeypatch.setattr(decode, "_PREFILL", 32)
  assert list(decode._parts(49)) == [(0, 32), (32, 32)]
  parts = run(*pad(long), KEYS)
  assert rows_of(parts) == rows_of(expected)
  np.testing.assert_allclose(parts.log_probs, expected.log_probs, atol=1e-5)


def test_prompts_of_many_lengths_share_programs():
  def programs():
    return decode._append._cache_size(), decode._steps._cache_size()

  run(*pad([[1] * 34, *PROMPTS[1:]]), KEYS)
  before = programs()
  for width, new in ((36, 28), (45, 6), (60, 4)):
    run(*pad([[1] * width, *PROMPTS[1:]]), KEYS, max_new_tokens=new, temperature=0.5, top_k=3)
  assert programs() == before


@pytest.mark.slow
def test_generates_inside_jit():
  @jax.jit
  def inside(prompts, lengths, keys):
    return run(prompts, lengths, keys)[:-1]

  for a, b in zip(inside(*pad(PROMPTS), KEYS), base()[:-1], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_layout_for_decoding_says_the_same():
  result = generate(model.for_decoding(PARAMS), CONFIG, *pad(PROMPTS), KEYS, max_new_tokens=12)
  assert rows_of(result) == rows_of(base())


def test_non_finite_logits_end_their_row_alone():
  # A row that says token 250 looks up an embedding that is not finite.
  spoilt = PARAMS | {"embedding": PARAMS["embedding"].at[250].set(jnp.nan)}
  result = generate(spoilt, CONFIG, *pad(PROMPTS), KEYS, max_new_tokens=12)
  rows = rows_of(base())
  for i, row in enumerate(rows_of(result)):
    said = (PROMPTS[i][-1:] + rows[i])[:-1]
    end = said.index(250) if 250 in said else 12
    assert bool(result.ok[i]) == (end == 12)
    assert row == rows[i][:end]
  assert not result.ok[1]
  assert result.ok.any()
  assert np.isfinite(result.log_probs).all()


@pytest.mark.parametrize(
  ("prompts", "options", "message"),
  [
    ([], {}, "prompts has 0 rows"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[1], [2, 259]], {}, "token 1 of prompt 1 is 259; the model knows 0 to 258"),
    ([[-1], [2]], {}, "token 0 of prompt 0 is -1"),
    ([[1] * 1000, [2]], {"max_new_tokens": 200}, "1000 tokens and max_new_tokens 200 exceed the "
     "model's context of 1100; use max_new_tokens up to 100"),
    ([[1], [2]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ([[1], [2]], {"chunk": 0}, "chunk is 0"),
    ([[1], [2], [3]], {}, "keys has 2 keys for 3 prompts"),
    ([[1], [2]], {"stop_ids": (259,)}, "stop_ids has 259"),
    ([[1], [2]], {"temperature": -1.0}, "temperature is -1.0"),
  ],
)  # fmt: skip
def test_bad_requests_are_refused_in_one_line(prompts, options, message):
  with pytest.raises(ValueError, match=message) as error:
    run(*pad(prompts), KEYS[:2], **options)
  assert "\n" not in str(error.value)


def test_full_cache_is_refused():
  cache = model.init_cache(PARAMS, CONFIG, 1, 16)
  with pytest.raises(
    ValueError, match="exceed the cache's capacity of 16; use max_new_tokens up to 13"
  ):
    run(*pad([[1, 2, 3]]), KEYS[:1], max_new_tokens=14, cache=cache)


def test_wrong_lengths_are_refused():
  with pytest.raises(ValueError, match=r"lengths\[0\] is 4; it must be from 1 to the 3 columns"):
    run(jnp.ones((1, 3), jnp.int32), jnp.array([4]), KEYS[:1])


# Texts.

GENERATOR = Generator(PARAMS, CONFIG, byte_level(), batch_size=4)
TEXTS = ["ab", [{"role": "user", "content": "hi"}], [5, 6, 7], "x"]
complete = functools.partial(GENERATOR.generate, max_new_tokens=12, stop_ids=())


def letter_generator():
  """Says letters only at top_k 13: they have opposite logits in pairs, all other tokens have 0."""
  pairs = PARAMS["head"][97:123:2]
  head = jnp.zeros_like(PARAMS["head"]).at[97:123:2].set(pairs).at[98:123:2].set(-pairs)
  return Generator(PARAMS | {"head": head}, CONFIG, byte_level(), batch_size=4)


LETTERS = functools.partial(
  letter_generator().generate, max_new_tokens=12, top_k=13, stop_ids=(), keys=KEYS
)


@functools.cache
def letters():
  return LETTERS(TEXTS)


def test_completions_hold_text_tokens_and_log_probs():
  for completion in complete(TEXTS, keys=KEYS):
    assert completion.finish_reason == "length"
    assert completion.text == byte_level().decode(completion.tokens)
    lengths = {len(completion.log_probs), len(completion.sample_log_probs)}
    assert lengths == {len(completion.tokens)} == {12}


def test_completions_do_not_depend_on_the_other_prompts():
  assert len({c.text for c in letters()}) == 4
  assert all(c.text.isalpha() and c.text.isascii() for c in letters())
  three = LETTERS(TEXTS[:3], keys=KEYS[:3])
  assert [c.tokens for c in three] == [c.tokens for c in letters()[:3]]
  reverse = LETTERS(TEXTS[::-1], keys=KEYS[::-1])
  assert [c.text for c in reverse[::-1]] == [c.text for c in letters()]


def test_samples_of_a_prompt_differ_and_the_first_is_that_of_one():
  many = LETTERS(TEXTS[:2], n=2, keys=KEYS[:2])
  assert len({c.text for c in many}) == 4
  assert [c.text for c in many[::2]] == [c.text for c in letters()[:2]]


def test_seed_fixes_the_texts():
  texts = [[c.text for c in LETTERS(TEXTS, keys=None, seed=seed)] for seed in (0, 0, 1)]
  assert texts[0] == texts[1] != texts[2]


def test_stop_text_cuts_text_tokens_and_log_probs():
  whole = letters()
  stop = whole[1].text[4:7]
  pieces = [""] * 4

  def callback(index, piece):
    pieces[index] += piece

  for chunk in (1, 5, 8):
    pieces[:] = [""] * 4
    cut = LETTERS(TEXTS, stop=[stop, "\u00e9"], callback=callback, chunk=chunk)
    assert pieces == [c.text for c in cut]
    for before, after in zip(whole, cut, strict=True):
      end = before.text.find(stop)
      assert after.finish_reason == ("length" if end < 0 else "stop")
      assert after.text == (before.text if end < 0 else before.text[:end])
      assert byte_level().decode(after.tokens) == after.text
      assert after.tokens == before.tokens[: len(after.tokens)]
      assert len(after.log_probs) == len(after.sample_log_probs) == len(after.tokens)
    assert cut[1].text == whole[1].text[: whole[1].text.find(stop)]


def test_stop_token_is_no_text():
  stop = letters()[0].tokens[3]
  end = letters()[0].tokens.index(stop)
  completion = LETTERS(TEXTS, stop_ids=(stop,))[0]
  assert completion.finish_reason == "stop"
  assert completion.tokens == letters()[0].tokens[: end + 1]
  assert completion.text == letters()[0].text[:end]
  assert len(completion.log_probs) == end + 1


def test_pieces_are_whole_characters():
  pieces = {}
  done = complete(
    TEXTS, keys=KEYS, callback=lambda i, p: pieces.setdefault(i, []).append(p), chunk=1
  )
  for i, completion in enumerate(done):
    assert "".join(pieces[i]) == completion.text


def test_errors_of_the_model_are_told():
  spoilt = PARAMS | {"embedding": PARAMS["embedding"].at[:].set(jnp.nan)}
  generator = Generator(spoilt, CONFIG, byte_level())
  for completion in generator.generate(["a"] * 4, max_new_tokens=3):
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", [], "error")


@pytest.mark.parametrize(
  ("prompts", "options", "message"),
  [
    ([], {}, "there are 0 prompts"),
    (["a"], {"n": 0}, "n is 0"),
    (["a", ""], {}, "prompt 1 is empty"),
    (["a"], {"stop": "end"}, "stop is 'end'; use a list"),
    (["a"], {"stop": [""]}, "texts that are not empty"),
    (["a"], {"keys": KEYS}, "keys has 4 keys for 1 prompts"),
    (["a" * 2000], {}, "exceed the model's context of 1100"),
  ],
)
def test_bad_prompts_are_refused(prompts, options, message):
  with pytest.raises(ValueError, match=message):
    complete(prompts, **options)


def test_tokenizer_of_another_model_is_refused():
  small = dataclasses.replace(CONFIG, vocab_size=200)
  with pytest.raises(ValueError, match="tokenizer has 259 tokens and the model 200"):
    Generator(PARAMS, small, byte_level())
