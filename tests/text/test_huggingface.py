import json
import shutil
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.text.huggingface import (
  HuggingFaceTokenizer,
  _tokenizers,
  read_chat_template,
  read_stop_ids,
)
from agentjax.text.tokenizer import TokenizerError
from tests.text.folders import CONTROLS, CORPUS, write_vocabulary

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from([*CONTROLS, *CORPUS, "<|im_", "e\u0301"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  directory = tmp_path_factory.mktemp("model")
  write_vocabulary(directory)
  return directory


@pytest.fixture(scope="module")
def tokenizer(folder):
  return HuggingFaceTokenizer(folder)


def _change(source, target, file, **values):
  shutil.copytree(source, target, dirs_exist_ok=True)
  state = json.loads((target / file).read_text())
  (target / file).write_text(json.dumps(state | values))
  return target


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(TEXTS, max_size=4))
def test_text_comes_back_and_never_holds_markup(tokenizer, parts):
  text = "".join(parts)
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
  assert not set(ids) & set(tokenizer.controls.values())


def test_ids_are_those_of_the_tokenizers_package(folder, tokenizer):
  reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  for text in CORPUS:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
  assert len(tokenizer.encode(CORPUS[0])) < len(CORPUS[0])
  assert tokenizer.controls == {t: reference.token_to_id(t) for t in CONTROLS}
  assert tokenizer.vocab_size == reference.get_vocab_size() == 330


def test_a_vocabulary_that_holds_its_markup_as_words_does_not_spell_it(folder, tmp_path):
  state = json.loads((folder / "tokenizer.json").read_text())
  vocab = state["model"]["vocab"] | {
    t: len(state["model"]["vocab"]) + i for i, t in enumerate(CONTROLS)
  }
  model = state["model"] | {"vocab": vocab, "ignore_merges": True}
  # Without the regex "<|im_end|>" reaches the model in one piece.
  words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
  changed = _change(folder, tmp_path / "m", "tokenizer.json", model=model, pre_tokenizer=words)
  tokenizer = HuggingFaceTokenizer(changed)
  ids = tokenizer.encode("<|im_end|>")
  assert tokenizer.decode(ids) == "<|im_end|>" and tokenizer.controls["<|im_end|>"] not in ids


def test_special_tokens_and_padding_come_from_the_settings(folder, tokenizer, tmp_path):
  assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
  assert tokenizer.pad_id == tokenizer.controls["<|endoftext|>"]
  bare = tmp_path / "bare"
  shutil.copytree(folder, bare)
  (bare / "tokenizer_config.json").unlink()
  (bare / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
  mapped = HuggingFaceTokenizer(bare)
  assert mapped.pad_id == mapped.controls["<|im_end|>"]


def test_tokens_that_only_the_settings_add_are_markup_too(folder, tmp_path):
  added = {"330": {"content": "<extra>", "special": True}}
  changed = _change(folder, tmp_path / "m", "tokenizer_config.json", added_tokens_decoder=added)
  tokenizer = HuggingFaceTokenizer(changed)
  assert tokenizer.controls["<extra>"] == 330 and tokenizer.vocab_size == 331
  assert tokenizer.decode([330]) == "<extra>" and 330 not in tokenizer.encode("<extra>")


def test_long_text_is_never_cut_or_padded(folder, tmp_path):
  state = json.loads((folder / "tokenizer.json").read_text())
  cut = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
  changed = _change(folder, tmp_path / "m", "tokenizer.json", **state | {"truncation": cut})
  assert (
    HuggingFaceTokenizer(changed).decode(HuggingFaceTokenizer(changed).encode(CORPUS[0]))
    == CORPUS[0]
  )


def test_the_fingerprint_tells_vocabularies_apart(folder, tokenizer, tmp_path):
  shutil.copytree(folder, tmp_path / "copy")
  assert HuggingFaceTokenizer(tmp_path / "copy").fingerprint() == tokenizer.fingerprint()
  write_vocabulary(tmp_path / "other", vocab_size=329)
  assert HuggingFaceTokenizer(tmp_path / "other").fingerprint() != tokenizer.fingerprint()


def test_stop_ids_are_those_of_both_files(folder, tokenizer, tmp_path):
  end, text_end = (tokenizer.controls[t] for t in ("<|im_end|>", "<|endoftext|>"))
  assert read_stop_ids(folder, tokenizer) == (end, text_end)
  changed = _change(folder, tmp_path / "m", "generation_config.json", eos_token_id=text_end)
  assert read_stop_ids(changed, tokenizer) == (text_end, end)


def test_the_template_is_read_from_either_file(folder, tmp_path):
  source = (folder / "chat_template.jinja").read_text()
  assert read_chat_template(folder) == source
  named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
  for template, expected in (("one", "one"), (named, "yes")):
    changed = _change(folder, tmp_path / expected, "tokenizer_config.json", chat_template=template)
    (changed / "chat_template.jinja").unlink()
    assert read_chat_template(changed) == expected


def _stripping(state):
  state["added_tokens"][0]["rstrip"] = True


def _prefixing(state):
  state["pre_tokenizer"]["add_prefix_space"] = True


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_stripping, "'<|endoftext|>' takes in what stands around it"),
    (_prefixing, "does not keep text as it is"),
    (lambda state: state.pop("model"), "is not a tokenizer"),
  ],
)
def test_a_vocabulary_that_would_change_text_is_refused(folder, tmp_path, change, message):
  shutil.copytree(folder, tmp_path / "m")
  state = json.loads((folder / "tokenizer.json").read_text())
  change(state)
  (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(state))
  with pytest.raises(TokenizerError) as caught:
    HuggingFaceTokenizer(tmp_path / "m")
  assert message in str(caught.value)


def test_files_that_disagree_or_are_missing_are_named(folder, tokenizer, tmp_path):
  with pytest.raises(TokenizerError, match=r"tokenizer.json: no such file.*config.pretrained"):
    HuggingFaceTokenizer(tmp_path)
  added = {"400": {"content": "<|im_end|>", "special": True}}
  changed = _change(folder, tmp_path / "m", "tokenizer_config.json", added_tokens_decoder=added)
  with pytest.raises(TokenizerError, match="belong to different vocabularies"):
    HuggingFaceTokenizer(changed)
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(TokenizerError, match=r"tokenizer_config.json cannot be read as JSON"):
    read_chat_template(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("{}")
  with pytest.raises(TokenizerError, match="has no chat template"):
    read_chat_template(tmp_path)


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
  for i in (-1, 330):
    with pytest.raises(TokenizerError, match=f"token id {i} is outside the vocabulary of 330"):
      tokenizer.decode([5, i])


def test_a_missing_package_is_named_with_its_extra(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  _tokenizers.cache_clear()
  try:
    with pytest.raises(TokenizerError, match=r"agentjax\[hf\]"):
      HuggingFaceTokenizer(folder)
  finally:
    _tokenizers.cache_clear()
