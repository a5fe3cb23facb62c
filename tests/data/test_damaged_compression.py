"""Readers of compressed files refuse a damaged one by its name."""

import gzip
import io
import json
import lzma
import pathlib
import tarfile
from collections.abc import Callable

import numpy as np
import pytest

from agentjax.adapters.agent_trajectories import read_trajectories
from agentjax.adapters.tools.search import read_corpus
from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.text_file import read_text
from agentjax.recipes.dmax.tasks import PassageConfig
from agentjax.recipes.skillclaw.sessions import read_transcripts
from agentjax.worlds.sokoban.game import read_levels
from agentjax.worlds.sql.spider import read_recorded_sql
from agentjax.worlds.textworld.game import TextWorldConfig, load_games

READERS: dict[str, Callable[[pathlib.Path], object]] = {
  "rows.jsonl.gz": lambda path: list(read_jsonl(path)),
  "text.txt.gz": read_text,
  "levels.txt.gz": lambda path: list(read_levels(path)),
  "passages.txt.gz": lambda path: PassageConfig().load(DataConfig(path=str(path.parent))),
  "episodes.json.gz": read_recorded_sql,
  "talks.json.gz": lambda path: list(read_trajectories(path, "openai")),
}


def flipped(path):
  """Writes a gzip file whose compressed bytes are damaged: zlib refuses them, not gzip."""
  packed = bytearray(gzip.compress(json.dumps(list(range(2000))).encode()))
  packed[10] = 0xFF  # the kind of the first block
  path.write_bytes(packed)
  return path


@pytest.mark.parametrize("name", READERS)
def test_flipped_bytes_are_refused_with_the_path(tmp_path, name):
  with pytest.raises(DataError, match=rf"{name}.*invalid block type"):
    READERS[name](flipped(tmp_path / name))


def test_flipped_bytes_of_a_corpus_are_refused_with_the_path(tmp_path):
  with pytest.raises(ConfigError, match=r"rows\.jsonl\.gz cannot be read .*invalid block type"):
    read_corpus([str(flipped(tmp_path / "rows.jsonl.gz"))])


def test_a_night_leaves_out_a_file_with_flipped_bytes(tmp_path):
  said = [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "Done."}]
  (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said}) + "\n")
  flipped(tmp_path / "b.jsonl.gz")
  sessions, refused = read_transcripts(tmp_path, "openai")
  assert len(sessions) == 1 and len(refused) == 1 and "b.jsonl.gz" in refused[0]


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_flipped_bytes_of_an_archive_of_games_are_refused(tmp_path, ending, pack):
  content = np.random.default_rng(0).integers(32, 127, 100_000).astype(np.uint8).tobytes()
  plain = io.BytesIO()
  with tarfile.open(fileobj=plain, mode="w") as archive:
    for number in range(4):
      member = tarfile.TarInfo(f"games/easy/train/{number}.json")
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  packed = bytearray(pack(plain.getvalue()))
  packed[len(packed) // 2 :: 7] = bytes(b ^ 0xFF for b in packed[len(packed) // 2 :: 7])
  (tmp_path / f"games.tar.{ending}").write_bytes(packed)
  with pytest.raises(DataError, match=rf"games\.tar\.{ending}: cannot be read"):
    load_games(TextWorldConfig(), str(tmp_path), "train", limit=None, first_id=0)
