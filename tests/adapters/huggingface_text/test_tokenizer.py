import json
import shutil
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.adapters.huggingface_text.chat import TemplateChat
from agentjax.adapters.huggingface_text.tokenizer import (
  HuggingFaceTokenizer,
  _tokenizers,
  read_chat_template,
  read_stop_ids,
)
from agentjax.text.tokenizer import TokenizerError
from agentjax.trajectory.record import Message
from tests.text.folders import (
  CONTROLS,
  CORPUS,
  GEMMA_CONTROLS,
  GEMMA_WORDS,
  write_gemma_vocabulary,
  write_vocabulary,
)

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


def test_a_vocabulary_that_cannot_write_a_text_says_so(folder, tmp_path):
  model = {"type": "BPE", "vocab": {"a": 0, "<unk>": 1}, "merges": [], "unk_token": "<unk>"}
  state = json.loads((folder / "tokenizer.json").read_text())
  added = [{**state["added_tokens"][0], "id": 1, "content": "<unk>"}]
  changed = _change(
    folder,
    tmp_path / "m",
    "tokenizer.json",
    model=model,
    added_tokens=added,
    pre_tokenizer=None,
    decoder=None,
    normalizer=None,
    post_processor=None,
  )
  (changed / "tokenizer_config.json").write_text("{}")
  with pytest.raises(TokenizerError, match="cannot write a text"):
    HuggingFaceTokenizer(changed)


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


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
  directory = tmp_path_factory.mktemp("gemma")
  write_gemma_vocabulary(directory)
  return directory


@pytest.fixture(scope="module")
def gemma(gemma_folder):
  return HuggingFaceTokenizer(gemma_folder)


@pytest.fixture(scope="module")
def gemma_reference(gemma_folder):
  return tokenizers.Tokenizer.from_file(str(gemma_folder / "tokenizer.json"))


_GEMMA_TEXTS = st.lists(
  st.one_of(
    st.text(max_size=20),
    st.text(" \n\t\u2581<>aT", max_size=12),
    st.sampled_from([*GEMMA_WORDS, *CORPUS, "<0x41>", "<tab", "le>", "\r\n", "\U0001f600"]),
  ),
  max_size=30,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=_GEMMA_TEXTS)
def test_ids_of_sentencepiece_vocabularies_are_the_packages(gemma, gemma_reference, text):
  text = text.encode("utf-8", "ignore").decode()
  for control in GEMMA_CONTROLS:
    text = text.replace(control, "")
  ids = gemma.encode(text)
  assert ids == gemma_reference.encode(text, add_special_tokens=False).ids
  assert gemma.decode(ids) == text.replace("\u2581", " ")
  spelled = b"".join(gemma.token_bytes()[i] for i in ids)
  assert spelled.decode() == text.replace("\u2581", " ")


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(GEMMA_CONTROLS), _GEMMA_TEXTS), max_size=6))
def test_sentencepiece_text_never_holds_markup(gemma, parts):
  text = "".join(parts)
  ids = gemma.encode(text)
  assert not set(ids) & set(gemma.controls.values())
  assert gemma.decode(ids) == text.replace("\u2581", " ")


def test_added_words_are_text_and_what_the_template_writes_is_markup(gemma, gemma_folder, tmp_path):
  assert set(gemma.controls) == set(GEMMA_CONTROLS)
  words = ["\n", "\n\n", "\n\n\n", "<table>", "\t\t"]
  assert [gemma.decode(gemma.encode(word)) for word in words] == words
  assert all(len(gemma.encode(word)) == 1 for word in words)
  shutil.copytree(gemma_folder, tmp_path / "m")
  (tmp_path / "m" / "chat_template.jinja").write_text("{{ '<table>' }}")
  assert "<table>" in HuggingFaceTokenizer(tmp_path / "m").controls


def test_conversations_of_sentencepiece_vocabularies_have_the_packages_ids(
  gemma_folder, gemma_reference
):
  chat = TemplateChat.from_folder(gemma_folder)
  question, answer = "Two  words\n\nand <table>", "print(total)\n\n\n"
  prompt = [i for span in chat.prompt([Message("user", question)]) for i in span.ids]
  turn = chat.assistant(Message("assistant", answer))
  after = [i for span in chat.observation([Message("user", "\n7")], turn) for i in span.ids]
  text = (
    f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n{answer}<end_of_turn>\n"
    "<start_of_turn>user\n\n7<end_of_turn>\n<start_of_turn>model\n"
  )
  reference = gemma_reference.encode(text, add_special_tokens=False).ids
  assert prompt + turn + after == reference
  assert chat.parse(turn).text == answer


@pytest.mark.parametrize("prepend", ["normalizer", "pre_tokenizer"])
def test_a_vocabulary_that_puts_a_space_before_texts_is_refused(gemma_folder, tmp_path, prepend):
  state = json.loads((gemma_folder / "tokenizer.json").read_text())
  if prepend == "normalizer":
    steps = [{"type": "Prepend", "prepend": "\u2581"}, state["normalizer"]]
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
  else:
    state["normalizer"] = None
    state["pre_tokenizer"] = {
      "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False
    }  # fmt: skip
  state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in GEMMA_CONTROLS]
  strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
  state["decoder"]["decoders"].append(strip)
  changed = _change(gemma_folder, tmp_path / "m", "tokenizer.json", **state)
  with pytest.raises(TokenizerError, match="stands behind another|does not keep text"):
    HuggingFaceTokenizer(changed)


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
