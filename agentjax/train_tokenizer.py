r"""Trains a sentencepiece vocabulary from text files.

  python -m agentjax.train_tokenizer --input=corpus.txt --output=tokenizer.model \
      --vocab_size=4096

The same files in the same order give the same model, byte for byte.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from absl import flags

from agentjax.command import main
from agentjax.text.tokenizer import SentencePieceTokenizer, TokenizerError, train_sentencepiece

_INPUT = flags.DEFINE_multi_string(
  "input", None, "Text file, UTF-8, plain or .gz; repeat the flag for several.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Model file to write.", required=True)
_VOCAB_SIZE = flags.DEFINE_integer(
  "vocab_size", 4096, "Upper bound of ids, with 8 special, 1 unknown and 256 byte pieces."
)
_MODEL_TYPE = flags.DEFINE_enum("model_type", "bpe", ["bpe", "unigram"], "Kind of vocabulary.")
_CHARACTER_COVERAGE = flags.DEFINE_float(
  "character_coverage",
  0.9995,
  "Share of the corpus' characters with a piece of their own; the rest are spelled in bytes.",
  lower_bound=0.5,
  upper_bound=1.0,
)


def read_lines(paths: Sequence[str]) -> Iterator[str]:
  """Lines of the files in order, without their ends.

  Raises:
    TokenizerError: a file is missing, damaged or not UTF-8; names file and line.
  """
  for path in paths:
    lines_read = 0
    try:
      with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        for line in file:
          lines_read += 1
          yield line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
      raise TokenizerError(f"{path}:{lines_read} is not UTF-8 ({error}); convert it.") from error
    except (OSError, EOFError, zlib.error) as error:
      raise TokenizerError(
        f"--input={path} cannot be read after line {lines_read}: {error}"
      ) from error


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  size = train_sentencepiece(
    read_lines(_INPUT.value),
    _OUTPUT.value,
    _VOCAB_SIZE.value,
    model_type=cast(Literal["bpe", "unigram"], _MODEL_TYPE.value),
    character_coverage=_CHARACTER_COVERAGE.value,
  )
  fingerprint = SentencePieceTokenizer(_OUTPUT.value).fingerprint()
  print(f"{Path(_OUTPUT.value)}: {size} ids, fingerprint {fingerprint[:16]}")


if __name__ == "__main__":
  main(run)
