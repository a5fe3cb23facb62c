"""Text to token ids and back, exactly: byte and sentencepiece vocabularies that share special ids.

The first eight ids of these mark roles, calls and ends. ``encode`` never yields them for any text,
so text cannot forge a role; only the chat rendering and the policy can. Vocabularies of folders
(``build.FolderKind``) follow the same protocol.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import sentencepiece

from agentjax.config import Config, ConfigError, FilePath
from agentjax.files import write_atomically
from agentjax.names import check_name, entry_names

SPECIAL_SPELLINGS = (
  "<|pad|>",
  "<|bos|>",
  "<|system|>",
  "<|user|>",
  "<|assistant|>",
  "<|tool|>",
  "<|call|>",
  "<|end|>",
)
NUM_BYTES = 256
_UNKNOWN = len(SPECIAL_SPELLINGS)  # sentencepiece insists on an unknown piece; bytes make it unused
_SPACE = "\u2581"  # sentencepiece writes a space as this character
# Characters for which sentencepiece would skip a line, or which it must never learn. They are
# spelled in bytes.
_NOT_LEARNT = re.compile(
  "|".join([r"[\x00-\x1f\x7f\u2581\u2585\ud800-\udfff]", *map(re.escape, SPECIAL_SPELLINGS)])
)
ROUND_TRIP_PROBE = "  two  spaces\n\tand 123<|end|>\u2581\u2047\u00e9\U0001f600 "


class TokenizerError(ValueError):
  """A vocabulary that cannot be used, or ids outside it."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
  """Ids of the special tokens, in the order of ``SPECIAL_SPELLINGS``."""

  pad: int = 0
  bos: int = 1
  system: int = 2
  user: int = 3
  assistant: int = 4
  tool: int = 5
  call: int = 6
  end: int = 7


class Tokenizer(Protocol):
  """The protocol of vocabularies."""

  name: str
  vocab_size: int
  pad_id: int

  def encode(self, text: str) -> list[int]:
    """Ids of ``text``, none of which is markup; ``decode(encode(text)) == text``.

    Lone surrogates, which are no text, become U+FFFD first. A vocabulary that normalises text
    (Qwen's does, to NFC) gives the normalised one back.
    """
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of any ids: specials as spelled, bytes that are not UTF-8 as U+FFFD.

    Raises:
      TokenizerError: an id outside ``[0, vocab_size)``.
    """
    ...

  def token_bytes(self) -> list[bytes | None]:
    """UTF-8 bytes of the text of each id; None for markup and unused ids."""
    ...

  def fingerprint(self) -> str:
    """SHA-256 hex of the vocabulary; equal if ids have the same meaning."""
    ...


class MarkedTokenizer(Tokenizer, Protocol):
  """A vocabulary whose first ids are the markup of this project."""

  special: SpecialTokens


class ByteTokenizer:
  """UTF-8 bytes after the special tokens: id = 8 + byte, 264 ids in all."""

  def __init__(self) -> None:
    self.name = "byte"
    self.special = SpecialTokens()
    self.pad_id = self.special.pad
    self.vocab_size = len(SPECIAL_SPELLINGS) + NUM_BYTES
    self._pieces = [s.encode() for s in SPECIAL_SPELLINGS] + [bytes([b]) for b in range(NUM_BYTES)]

  def encode(self, text: str) -> list[int]:
    return [byte + len(SPECIAL_SPELLINGS) for byte in valid_text(text).encode()]

  def decode(self, ids: Sequence[int]) -> str:
    return _join(self._pieces, ids)

  def token_bytes(self) -> list[bytes | None]:
    return _texts(self._pieces)

  def fingerprint(self) -> str:
    return hashlib.sha256(repr(self._pieces).encode()).hexdigest()


class SentencePieceTokenizer:
  """A sentencepiece model as ``train_sentencepiece`` makes them.

  Each digit is one token, whitespace is kept, and characters without a piece are spelled in bytes,
  so every text round-trips.

  Args:
    model_file: path of the model.

  Raises:
    TokenizerError: the file is missing or damaged, lacks the special tokens at ids 0..7, lacks the
      256 byte pieces, or normalises text.
  """

  def __init__(self, model_file: str | os.PathLike[str]) -> None:
    path = os.fspath(model_file)
    try:
      model = Path(path).read_bytes()
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
      raise TokenizerError(
        f"{path} is not a readable sentencepiece model ({error}); train one with "
        "python -m agentjax.train_tokenizer."
      ) from error
    self.name = "sentencepiece"
    self.special = SpecialTokens()
    self.pad_id = self.special.pad
    self.vocab_size = self._processor.get_piece_size()
    names = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
    if tuple(names[: len(SPECIAL_SPELLINGS)]) != SPECIAL_SPELLINGS or not all(
      self._processor.is_control(i) for i in range(len(SPECIAL_SPELLINGS))
    ):
      raise TokenizerError(
        f"{path} starts with the pieces {names[: len(SPECIAL_SPELLINGS)]}; ids 0..7 must be the "
        f"control pieces {list(SPECIAL_SPELLINGS)}. Train the model with "
        "python -m agentjax.train_tokenizer."
      )
    ids = {name: i for i, name in enumerate(names)}
    byte_ids = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(NUM_BYTES)]
    if not all(i >= 0 and self._processor.is_byte(i) for i in byte_ids):
      raise TokenizerError(f"{path} has no byte pieces; train the model with byte_fallback.")
    self._pieces = [_piece_bytes(self._processor, i) for i in range(self.vocab_size)]
    self._space_ids = [byte_ids[byte] for byte in _SPACE.encode()]
    if self.decode(self.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
      raise TokenizerError(
        f"{path} does not keep text as it is: {ROUND_TRIP_PROBE!r} came back as "
        f"{self.decode(self.encode(ROUND_TRIP_PROBE))!r}. Train it with identity normalisation, no "
        "dummy prefix and extra whitespace kept."
      )

  def encode(self, text: str) -> list[int]:
    text = valid_text(text)
    if _SPACE not in text:
      return self._processor.encode(text)
    ids: list[int] = []
    for i, part in enumerate(text.split(_SPACE)):
      if i:
        ids.extend(self._space_ids)
      ids.extend(self._processor.encode(part))
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    return _join(self._pieces, ids)

  def token_bytes(self) -> list[bytes | None]:
    return _texts(self._pieces)

  def fingerprint(self) -> str:
    digest = hashlib.sha256()
    for i, piece in enumerate(self._pieces):
      digest.update(repr((piece, self._processor.get_score(i))).encode())
    return digest.hexdigest()


def train_sentencepiece(
  lines: Iterable[str],
  model_path: str | os.PathLike[str],
  vocab_size: int,
  *,
  model_type: Literal["bpe", "unigram"] = "bpe",
  character_coverage: float = 1.0,
) -> int:
  """Trains a vocabulary on ``lines`` and writes ``model_path`` atomically.

  The same lines give the same bytes: one thread, no sampling of the input, no path in the model.

  Args:
    lines: any texts; control characters and spellings of special tokens are never learned.
    model_path: file to write; an existing one is replaced.
    vocab_size: upper bound of ids, with the 8 special, 1 unknown and 256 byte pieces. A small
      corpus gives fewer.
    model_type: "bpe" or "unigram".
    character_coverage: share of the corpus's characters that get their own piece; the rest are
      spelled in bytes.

  Returns:
    The number of ids in the vocabulary.

  Raises:
    TokenizerError: no text, or ``vocab_size`` below what the corpus needs.
  """
  least = _UNKNOWN + 1 + NUM_BYTES
  if vocab_size <= least:
    raise TokenizerError(
      f"vocab_size={vocab_size} leaves no room for pieces; it must exceed {least} "
      "(8 special, 1 unknown, 256 byte pieces)."
    )
  sentences = _Sentences(lines)
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(sentences),
      model_writer=model,
      model_type=model_type,
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      pad_id=0,
      pad_piece=SPECIAL_SPELLINGS[0],
      bos_id=1,
      bos_piece=SPECIAL_SPELLINGS[1],
      control_symbols=list(SPECIAL_SPELLINGS[2:-1]),  # take the free ids 2..6
      eos_id=_UNKNOWN - 1,
      eos_piece=SPECIAL_SPELLINGS[-1],
      unk_id=_UNKNOWN,
      unk_piece="<|unknown|>",
      byte_fallback=True,
      split_digits=True,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      character_coverage=character_coverage,
      input_sentence_size=0,
      shuffle_input_sentence=False,
      max_sentence_length=1 << 30,  # the default skips lines above 4,192 bytes without a word
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as error:
    if not sentences.count:
      raise TokenizerError("the corpus holds no text to train a tokenizer on.") from error
    raise TokenizerError(
      f"no vocabulary of vocab_size={vocab_size} from this corpus: {error} Raise vocab_size or "
      f"lower character_coverage={character_coverage}."
    ) from error
  write_atomically(Path(model_path), model.getvalue())
  return SentencePieceTokenizer(model_path).vocab_size


_MARKED_KINDS = ("byte", "sentencepiece", "sentencepiece_from_tasks")
# Kinds of folders by name (see ``build.FolderKind``), and the group of entry points.
FOLDER_KINDS = (
  {"huggingface": "agentjax.adapters.huggingface_text.chat:FOLDERS"},
  "agentjax.vocabularies",
)


@dataclasses.dataclass(unsafe_hash=True)
class TokenizerConfig(Config):
  """Which vocabulary.

  Attributes:
    kind: "byte"; "sentencepiece", a trained model at ``path``; "sentencepiece_from_tasks", trained
      on the text of the training tasks when a run starts and kept in its work directory;
      "huggingface", ``tokenizer.json`` and the chat template of a folder; or "module:attribute" of
      another ``text.FolderKind``.
    path: model file of kind "sentencepiece", or folder of a kind that reads one; for such a kind
      None is the folder of ``config.pretrained``.
    vocab_size: upper bound of ids, for kind "sentencepiece_from_tasks" only. Ours.
  """

  kind: str = "byte"
  path: FilePath | None = None
  vocab_size: int = 512

  @property
  def reads_folder(self) -> bool:
    """Whether a folder has the chat format; otherwise it is our own markup."""
    return self.kind not in _MARKED_KINDS

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    check_name(self.kind, f"{path}.kind", (*_MARKED_KINDS, *entry_names(*FOLDER_KINDS)))
    if self.kind == "sentencepiece":
      require(
        self.path is not None,
        "path",
        'the file of a sentencepiece model when kind is "sentencepiece"',
      )
    elif not self.reads_folder:
      require(
        self.path is None,
        "path",
        f'None when kind is {self.kind!r}; "sentencepiece" reads a file, "huggingface" a folder',
      )
    least = _UNKNOWN + 1 + NUM_BYTES
    if self.kind == "sentencepiece_from_tasks":
      require(
        self.vocab_size > least,
        "vocab_size",
        f"more than {least} (8 special, 1 unknown and 256 byte pieces)",
      )


def build_tokenizer(
  config: TokenizerConfig,
  *,
  lines: Iterable[str] = (),
  directory: str | os.PathLike[str] | None = None,
) -> MarkedTokenizer:
  """The tokenizer of a run whose vocabulary has our markup.

  Args:
    config: which one; not one that reads a folder (see ``build_chat``).
    lines: text to train on, read only by kind "sentencepiece_from_tasks" and only where
      ``directory`` holds no model yet.
    directory: where that kind keeps ``tokenizer.model``, so that a resumed run has the same ids.

  Raises:
    TokenizerError: the model cannot be read or trained.
    ConfigError: kind "sentencepiece_from_tasks" without a directory.
    ValueError: a kind that reads a folder.
  """
  config.validate("config.tokenizer")
  if config.kind == "byte":
    return ByteTokenizer()
  if config.reads_folder:
    raise ValueError(f"kind {config.kind!r} comes with a chat of its own; use build_chat.")
  if config.path is not None:
    return SentencePieceTokenizer(config.path)
  if directory is None:
    raise ConfigError(
      f"config.tokenizer.kind={config.kind!r} keeps its model in the work directory; got none. "
      'Give a directory or use kind "byte".'
    )
  model_path = Path(directory) / "tokenizer.model"
  if not model_path.exists():
    train_sentencepiece(lines, model_path, config.vocab_size)
  return SentencePieceTokenizer(model_path)


class _Sentences:
  """The learnable parts of the lines, counted, because an empty corpus gets its own error."""

  def __init__(self, lines: Iterable[str]) -> None:
    self._lines = lines
    self.count = 0

  def __iter__(self) -> Iterator[str]:
    for line in self._lines:
      for part in _NOT_LEARNT.split(line):
        if part:
          self.count += 1
          yield part


def valid_text(text: str) -> str:
  """``text`` with lone surrogates, which UTF-8 cannot hold, as U+FFFD."""
  if text.isascii():
    return text
  return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _piece_bytes(processor: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
  piece = processor.id_to_piece(i)
  if processor.is_byte(i):
    return bytes([int(piece[3:5], 16)])
  if processor.is_unknown(i):
    return "\ufffd".encode()
  if processor.is_control(i):
    return piece.encode()
  return piece.replace(_SPACE, " ").encode()


def _texts(pieces: list[bytes]) -> list[bytes | None]:
  marked = len(SPECIAL_SPELLINGS)
  return [None] * marked + pieces[marked:]


def _join(pieces: list[bytes], ids: Sequence[int]) -> str:
  try:
    if len(ids) and min(ids) < 0:
      raise IndexError
    return b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
  except IndexError:
    outside = next(int(i) for i in ids if not 0 <= i < len(pieces))
    raise TokenizerError(
      f"token id {outside} is outside the vocabulary of {len(pieces)} ids; the model's "
      "vocab_size must be the tokenizer's."
    ) from None
