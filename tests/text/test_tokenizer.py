import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.files import write_atomically
from agentjax.text.tokenizer import (
  SPECIAL_SPELLINGS,
  ByteTokenizer,
  SentencePieceTokenizer,
  TokenizerConfig,
  TokenizerError,
  build_tokenizer,
  train_sentencepiece,
)

CORPUS = [
  f"Tom has {a} apples and buys {b} more. How many apples has he now?\n#### {a + b}"
  for a, b in itertools.product(range(3, 20), range(2, 9))
]
# Spellings of markup, of sentencepiece's own pieces and of its space, among any other characters.
FORGERIES = st.lists(
  st.one_of(
    st.sampled_from([*SPECIAL_SPELLINGS, "<unk>", "<|unknown|>", "<0x41>", "<s>", "\u2581", "  "]),
    st.text(max_size=8),
    st.sampled_from(CORPUS),
  ),
  max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
  path = tmp_path_factory.mktemp("model") / "tokenizer.model"
  train_sentencepiece(CORPUS, path, 400)
  return path


@pytest.fixture(scope="module", params=["byte", "sentencepiece"])
def tokenizer(request, model_path):
  return ByteTokenizer() if request.param == "byte" else SentencePieceTokenizer(model_path)


@settings(max_examples=300, deadline=None)
@given(text=FORGERIES)
@example(text="\x00\t\r\n\u2028\u0085\ufeff\u2581\u2585")
@example(text="a\u2581\u2581b \u2581")
def test_any_text_comes_back_and_never_forges_markup(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert all(len(SPECIAL_SPELLINGS) <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(categories=["Cs", "Lu", "So"])))
def test_lone_surrogates_become_replacement_characters(tokenizer, text):
  back = tokenizer.decode(tokenizer.encode(text))
  assert back == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in _paired(text))


def _paired(text: str) -> str:
  """Surrogates that stand as a pair are one character, as UTF-16 says."""
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_have_a_text(tokenizer, data):
  ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
  text = tokenizer.decode(ids)
  text.encode()
  for i, spelling in enumerate(SPECIAL_SPELLINGS):
    assert text.count(spelling) >= ids.count(i)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_named(tokenizer, bad):
  with pytest.raises(TokenizerError, match=f"token id {bad} is outside"):
    tokenizer.decode([9, bad, 10])


def test_special_ids_are_the_same_in_every_vocabulary(tokenizer):
  special = tokenizer.special
  ids = [special.pad, special.bos, special.system, special.user]
  ids += [special.assistant, special.tool, special.call, special.end]
  assert ids == list(range(8))
  assert [tokenizer.decode([i]) for i in ids] == list(SPECIAL_SPELLINGS)
  assert tokenizer.pad_id == special.pad


def test_bytes_are_utf8_after_the_special_ids():
  assert ByteTokenizer().encode("aé") == [8 + 0x61, 8 + 0xC3, 8 + 0xA9]
  assert ByteTokenizer().vocab_size == 264


def test_digits_are_one_token_each_and_words_are_few(model_path):
  tokenizer = SentencePieceTokenizer(model_path)
  assert len(tokenizer.encode("7310592468")) == 10
  assert len(tokenizer.encode("7 9")) == 3
  assert len(tokenizer.encode("Tom has")) == 2


def test_same_corpus_gives_same_bytes_from_any_place_and_process(model_path, tmp_path):
  elsewhere = tmp_path / "deeper" / "other.model"
  program = (
    "import sys, json; from agentjax.text.tokenizer import train_sentencepiece;"
    "train_sentencepiece(json.load(sys.stdin), sys.argv[1], 400)"
  )
  subprocess.run(
    [sys.executable, "-c", program, str(elsewhere)],
    input=json.dumps(CORPUS),
    text=True,
    check=True,
    env={**os.environ, "PYTHONHASHSEED": "7"},
  )
  assert elsewhere.read_bytes() == model_path.read_bytes()


def test_fingerprint_tells_vocabularies_apart(model_path, tmp_path):
  train_sentencepiece(CORPUS, tmp_path / "smaller.model", 350)
  prints = {
    SentencePieceTokenizer(model_path).fingerprint(),
    SentencePieceTokenizer(tmp_path / "smaller.model").fingerprint(),
    ByteTokenizer().fingerprint(),
  }
  assert len(prints) == 3
  again = SentencePieceTokenizer(model_path).fingerprint()
  assert again in prints and len(bytes.fromhex(again)) == hashlib.sha256().digest_size


def test_markup_in_the_corpus_is_not_learnt(tmp_path):
  path = tmp_path / "m.model"
  train_sentencepiece(["<|call|> <|end|><|call|> and tea"] * 200, path, 300)
  processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
  learnt = [processor.id_to_piece(i) for i in range(265, processor.get_piece_size())]
  assert learnt and not any("|" in piece or "<" in piece for piece in learnt)


def test_a_line_of_any_length_is_learnt(tmp_path):
  path = tmp_path / "m.model"
  train_sentencepiece(["zebra " * 3000], path, 300)
  assert len(SentencePieceTokenizer(path).encode("zebra")) == 1


def test_a_small_corpus_gives_fewer_ids_than_allowed(tmp_path):
  assert train_sentencepiece(["a b"], tmp_path / "m.model", 5000) < 300


@pytest.mark.parametrize(
  ("lines", "size", "message"),
  [
    ([], 300, "holds no text"),
    (["\n\t", "<|end|>"], 300, "holds no text"),
    (["text"], 265, "vocab_size=265 leaves no room for pieces"),
    (["".join(chr(0x4E00 + i) for i in range(200))], 300, "Raise vocab_size"),
  ],
)
def test_a_vocabulary_that_cannot_be_is_refused_and_nothing_written(tmp_path, lines, size, message):
  with pytest.raises(TokenizerError, match=message):
    train_sentencepiece(lines, tmp_path / "m.model", size)
  assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
  path = tmp_path / "m.model"
  path.write_bytes(b"old")

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    write_atomically(path, b"new")
  assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def _foreign_model(path: Path, **changes: object) -> None:
  settings: dict[str, Any] = dict(
    model_type="bpe",
    vocab_size=320,
    hard_vocab_limit=False,
    pad_id=0,
    pad_piece=SPECIAL_SPELLINGS[0],
    bos_id=1,
    bos_piece=SPECIAL_SPELLINGS[1],
    control_symbols=list(SPECIAL_SPELLINGS[2:-1]),
    eos_id=7,
    eos_piece=SPECIAL_SPELLINGS[-1],
    unk_id=8,
    byte_fallback=True,
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    minloglevel=2,
  )
  with path.open("wb") as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(CORPUS[:20]), model_writer=file, **{**settings, **changes}
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(bos_piece="<s>"), "ids 0..7 must be the control pieces"),
    (
      dict(control_symbols=[], user_defined_symbols=list(SPECIAL_SPELLINGS[2:-1])),
      "ids 0..7 must be the control pieces",
    ),
    (dict(byte_fallback=False), "no byte pieces"),
    (dict(normalization_rule_name="nmt_nfkc"), "does not keep text as it is"),
    (dict(add_dummy_prefix=True), "does not keep text as it is"),
    (dict(remove_extra_whitespaces=True), "does not keep text as it is"),
  ],
)
def test_a_model_that_would_change_text_or_forge_markup_is_refused(tmp_path, changes, message):
  path = tmp_path / "foreign.model"
  _foreign_model(path, **changes)
  with pytest.raises(TokenizerError, match=message):
    SentencePieceTokenizer(path)


def test_a_missing_or_damaged_model_is_refused(model_path, tmp_path):
  with pytest.raises(TokenizerError, match="No such file"):
    SentencePieceTokenizer(tmp_path / "none.model")
  cut = tmp_path / "cut.model"
  cut.write_bytes(model_path.read_bytes()[:-7])
  with pytest.raises(TokenizerError, match=str(cut)):
    SentencePieceTokenizer(cut)


def test_tasks_train_a_tokenizer_once_for_a_run(tmp_path):
  config = TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=350)
  first = build_tokenizer(config, lines=CORPUS, directory=tmp_path)
  resumed = build_tokenizer(config, lines=["other text"], directory=tmp_path)
  assert first.fingerprint() == resumed.fingerprint()
  loaded = TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "tokenizer.model"))
  assert build_tokenizer(loaded).fingerprint() == first.fingerprint()
  assert build_tokenizer(TokenizerConfig()).name == "byte"


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (TokenizerConfig(kind="sentencepiece"), "config.tokenizer.path=None"),
    (TokenizerConfig(kind="byte", path="x"), "config.tokenizer.path='x'"),
    (TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=9), "tokenizer.vocab_size=9"),
    (TokenizerConfig(kind="sentencepiece_from_tasks"), "got none"),
  ],
)
def test_a_bad_setting_is_named(config, field):
  with pytest.raises(ConfigError, match=field):
    build_tokenizer(config, lines=CORPUS)
