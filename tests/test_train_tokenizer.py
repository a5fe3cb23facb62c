import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentjax.text.tokenizer import SentencePieceTokenizer

DATA = os.environ.get("AGENTJAX_DATA")


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "agentjax.train_tokenizer", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def test_files_become_a_model(tmp_path):
  (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 30)
  with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
    file.write("a dog sat on the log\n" * 30)
  output = tmp_path / "tokenizer.model"
  run = _run(
    f"--input={tmp_path / 'a.txt'}",
    f"--input={tmp_path / 'b.txt.gz'}",
    f"--output={output}",
    "--vocab_size=320",
  )
  assert run.returncode == 0, run.stderr
  tokenizer = SentencePieceTokenizer(output)
  assert f"{tokenizer.vocab_size} ids" in run.stdout
  assert tokenizer.fingerprint()[:16] in run.stdout
  assert len(tokenizer.encode("dog")) == len(tokenizer.encode("cat")) == 1


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (None, "No such file"),
    (b"fine\n\xff\xfe\n", ":2 is not UTF-8"),
    (b"", "holds no text"),
  ],
)
def test_bad_input_is_one_line_and_no_model(tmp_path, content, message):
  if content is not None:
    (tmp_path / "in.txt").write_bytes(content)
  run = _run(f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out' / 'm.model'}")
  assert run.returncode == 2
  assert message in run.stderr and "Traceback" not in run.stderr
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
def test_shakespeare_trains_the_same_twice_and_round_trips(tmp_path):
  corpus = Path(str(DATA)) / "text" / "tinyshakespeare.txt.gz"
  for name in ("one", "two"):
    run = _run(f"--input={corpus}", f"--output={tmp_path / name}", "--vocab_size=1024")
    assert run.returncode == 0, run.stderr
  assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
  text = gzip.decompress(corpus.read_bytes()).decode()[:20_000]
  tokenizer = SentencePieceTokenizer(tmp_path / "one")
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert len(ids) < 0.5 * len(text)  # 1,024 ids halve the length of English at least
