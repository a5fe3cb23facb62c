"""Vocabulary and chat files of a Hugging Face folder, without the transformers package."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from agentjax.text.tokenizer import ROUND_TRIP_PROBE, TokenizerError, valid_text

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_SPACE = "\u2581"  # sentencepiece writes a space as this character
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_MEANING = ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")


class HuggingFaceTokenizer:
  """``tokenizer.json`` of a folder, with the added tokens of ``tokenizer_config.json``.

  Added tokens (``<|im_end|>``, ``<think>``, ``<tool_call>`` and the like) are markup: ``encode``
  never yields one for any text. Only the code that writes conversations places them, by their ids
  in ``controls``. Ids without a token, which some vocabularies have, decode to nothing.

  Vocabularies in sentencepiece's manner (Gemma) also add plain words: runs of line breaks and of
  spaces, HTML tags. These are text: ``encode`` gives the ids that the tokenizers package gives. An
  added token is text where it is not special, the model's own vocabulary holds it, and it is blank
  or the folder's chat template does not write it. Such vocabularies write a space as U+2581, so
  that this character comes back as a space.

  Args:
    directory: the folder.

  Attributes:
    controls: id of every added token by its spelling.
    special_tokens: spelling of ``bos_token``, ``eos_token``, ``pad_token`` and ``unk_token``, where
      the folder names them.

  Raises:
    TokenizerError: the package ``tokenizers`` is not installed; a file is missing or damaged; the
      vocabulary does not give text back, or an added token takes in the blanks around it.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    tokenizers = _tokenizers()
    folder = Path(directory)
    path = folder / "tokenizer.json"
    if not path.is_file():
      raise TokenizerError(
        f"{path}: no such file. Give a Hugging Face folder with a tokenizer.json "
        "(config.pretrained or config.tokenizer.path)."
      )
    files = (
      read_json(folder / "tokenizer_config.json"),
      read_json(folder / "special_tokens_map.json"),
    )
    state = read_json(path)
    added = _added_tokens(state, files[0])
    words = (state.get("model") or {}).get("vocab") or {}
    template = _chat_template(folder) or ""
    markup = [token for token in added if not _is_text(token, words, template)]
    try:
      self._full = tokenizers.Tokenizer.from_str(json.dumps({**state, "added_tokens": added}))
      self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without_markup(state, added, markup)))
    except Exception as error:  # the package raises bare Exception
      raise TokenizerError(f"{path} is not a tokenizer: {error}.") from error
    for side in (self._full, self._plain):
      side.no_truncation()
      side.no_padding()
    self.name = f"Hugging Face ({folder.name})"
    self.controls: Mapping[str, int] = MappingProxyType({t["content"]: t["id"] for t in markup})
    for spelling, i in self.controls.items():
      if self._full.token_to_id(spelling) != i:
        raise TokenizerError(
          f"{folder}: tokenizer_config.json gives {spelling!r} the id {i}, tokenizer.json "
          f"{self._full.token_to_id(spelling)}; the files belong to different vocabularies."
        )
    self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
    self.special_tokens = _special_tokens(*files)
    pad = self.special_tokens.get("pad_token", self.special_tokens.get("eos_token", ""))
    self.pad_id = self.controls.get(pad, 0)
    self._control_ids = frozenset(self.controls.values())
    self._decoders = _decoder_types(state.get("decoder"))
    meaning = {name: state.get(name) for name in _MEANING} | {"added_tokens": added}
    self._fingerprint = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
    for probe in (ROUND_TRIP_PROBE, ROUND_TRIP_PROBE.strip()):
      again = self.decode(self.encode(probe))
      if again not in (probe, probe.replace(_SPACE, " ")):
        raise TokenizerError(
          f"{path} does not keep text as it is: {probe!r} came back as {again!r}. Vocabularies on "
          "bytes (Qwen, Nemotron, Llama 3), and those of Gemma, do."
        )
    parts = ("two", "words ", " apart")
    together = self.decode([i for part in parts for i in self.encode(part)])
    if together != "".join(parts):
      raise TokenizerError(
        f"{path} writes a text otherwise where it stands behind another: {parts} came back as "
        f"{together!r}. Allowed: a vocabulary that puts no space before a text (its normalizer and "
        "pre_tokenizer prepend nothing)."
      )

  def encode(self, text: str) -> list[int]:
    try:
      ids: list[int] = self._plain.encode(valid_text(text), add_special_tokens=False).ids
    except Exception as error:  # the package raises bare Exception
      raise TokenizerError(
        f"the vocabulary of {self.name} cannot write a text: {error}."
      ) from error
    if not self._control_ids.isdisjoint(ids):
      raise TokenizerError(
        f"the vocabulary of {self.name} spells {self.decode(ids)[:80]!r} with an added token; it "
        "cannot tell text from markup."
      )
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    ids = [int(i) for i in ids]
    outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
    if outside is not None:
      raise TokenizerError(
        f"token id {outside} is outside the vocabulary of {self.vocab_size} ids; the model's "
        "vocab_size must be at least the tokenizer's, and the engine draws no higher id."
      )
    return self._full.decode(ids, skip_special_tokens=False)

  def token_bytes(self) -> list[bytes | None]:
    """As in ``Tokenizer``.

    Raises:
      TokenizerError: the pieces of this kind of vocabulary do not spell bytes.
    """
    found: list[bytes | None] = [None] * self.vocab_size
    for piece, i in self._full.get_vocab(with_added_tokens=True).items():
      if i not in self._control_ids:
        found[i] = self._piece_bytes(piece)
    probe = self.encode(ROUND_TRIP_PROBE)
    if b"".join(found[i] or b"" for i in probe) != self.decode(probe).encode():
      raise TokenizerError(
        f"the pieces of {self.name} do not spell the bytes of a text (decoder "
        f"{', '.join(self._decoders) or 'none'}); grammars need a vocabulary on bytes."
      )
    return found

  def _piece_bytes(self, piece: str) -> bytes | None:
    if "ByteLevel" in self._decoders:
      table = _byte_of_character()
      known = all(c in table for c in piece)
      return bytes(table[c] for c in piece) if known else None
    if "ByteFallback" in self._decoders and _BYTE_PIECE.fullmatch(piece):
      return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode()

  def fingerprint(self) -> str:
    return self._fingerprint


def read_chat_template(directory: str | os.PathLike[str]) -> str:
  """``chat_template.jinja`` of a folder, or ``chat_template`` of its ``tokenizer_config.json``.

  Of several named templates the one called "default" counts.

  Raises:
    TokenizerError: there is none.
  """
  folder = Path(directory)
  template = _chat_template(folder)
  if template is None:
    raise TokenizerError(
      f"{folder} has no chat template: neither chat_template.jinja nor a chat_template in "
      "tokenizer_config.json. Use the folder of an instruction-tuned model, or add a template."
    )
  return template


def _chat_template(folder: Path) -> str | None:
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text(encoding="utf-8")
  template = read_json(folder / "tokenizer_config.json").get("chat_template")
  if isinstance(template, list):
    template = {t.get("name"): t.get("template") for t in template}.get("default")
  return template if isinstance(template, str) else None


def read_stop_ids(
  directory: str | os.PathLike[str], tokenizer: HuggingFaceTokenizer
) -> tuple[int, ...]:
  """Ids that end a generation: those of ``generation_config.json``, and the EOS token."""
  named = read_json(Path(directory) / "generation_config.json").get("eos_token_id")
  ids = list(named) if isinstance(named, list) else [named]
  ids.append(tokenizer.controls.get(tokenizer.special_tokens.get("eos_token", "")))
  return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def read_json(path: Path) -> dict[str, Any]:
  """The object in a JSON file; empty where the file does not exist.

  Raises:
    TokenizerError: it is not JSON, or no object.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, RecursionError) as error:
    raise TokenizerError(f"{path} cannot be read as JSON: {error}.") from error
  if not isinstance(value, dict):
    raise TokenizerError(f"{path} holds a JSON {type(value).__name__} in the place of an object.")
  return value


@functools.cache
def _tokenizers() -> ModuleType:
  try:
    import tokenizers
  except ImportError as error:
    raise TokenizerError(
      'tokenizer.kind="huggingface" needs the package tokenizers: pip install "agentjax[hf]".'
    ) from error
  return tokenizers


def _decoder_types(decoder: Mapping[str, Any] | None) -> tuple[str, ...]:
  """Names of the steps that turn pieces into text."""
  if decoder is None:
    return ()
  steps = decoder.get("decoders", (decoder,))
  return tuple(str(step.get("type")) for step in steps)


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """How byte-level vocabularies (GPT-2's and all after it) spell bytes as printable characters.

  Bytes that print stand for themselves; the others, in order, are the characters from 256 on.
  """
  printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _added_tokens(state: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Added tokens by id: those of tokenizer.json, and what only tokenizer_config.json names."""
  by_id = {int(token["id"]): dict(token) for token in state.get("added_tokens") or ()}
  for key, token in (config.get("added_tokens_decoder") or {}).items():
    by_id.setdefault(int(key), {"id": int(key), **token})
  flags = ("lstrip", "rstrip", "single_word", "normalized")
  added = []
  for i in sorted(by_id):
    token = by_id[i]
    if any(token.get(flag) for flag in flags[:3]):
      raise TokenizerError(
        f"added token {token['content']!r} takes in what stands around it; allowed: tokens "
        "without lstrip, rstrip, single_word."
      )
    plain = {flag: bool(token.get(flag, False)) for flag in flags}
    special = bool(token.get("special", False))
    added.append({"id": i, "content": token["content"], **plain, "special": special})
  return added


def _is_text(token: Mapping[str, Any], words: Any, template: str) -> bool:
  """Whether an added token is a plain word (see ``HuggingFaceTokenizer``).

  Raises:
    TokenizerError: markup of a single character, which no text could be kept from spelling.
  """
  spelling = token["content"]
  blank = not spelling.replace(_SPACE, " ").strip()
  held = isinstance(words, dict) and spelling in words
  if not token["special"] and held and (blank or spelling not in template):
    return True
  if len(spelling) < 2:
    raise TokenizerError(
      f"added token {spelling!r} has a single character; allowed: markup of two and more."
    )
  return False


def _without_markup(
  state: Mapping[str, Any],
  added: Sequence[Mapping[str, Any]],
  markup: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """The tokenizer that knows no markup, so that text which spells it stays text."""
  model = dict(state.get("model") or {})
  spelled = {token["content"] for token in markup}
  if isinstance(model.get("vocab"), dict):
    model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in spelled}
  text = [token for token in added if token["content"] not in spelled]
  return {**state, "model": model, "added_tokens": text, "post_processor": None}


def _special_tokens(*files: Mapping[str, Any]) -> dict[str, str]:
  """bos, eos, pad and unk token; the first file that names one counts."""
  found: dict[str, str] = {}
  for file in files:
    for name in _SPECIAL_NAMES:
      value = file.get(name)
      spelling = value.get("content") if isinstance(value, dict) else value
      if isinstance(spelling, str):
        found.setdefault(name, spelling)
  return found
