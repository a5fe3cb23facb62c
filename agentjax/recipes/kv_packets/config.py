"""How a run reads known documents as packets."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, cast

from agentjax.adapters.tools.search import Document, read_corpus
from agentjax.config import ConfigError, FilePath, PositiveInt, check
from agentjax.data.errors import DataError
from agentjax.engine import Engine, EngineConfig
from agentjax.models import ModelConfig
from agentjax.models.pieces import unjoinable
from agentjax.recipes.kv_packets.adapter import Adapter, read_adapter
from agentjax.recipes.kv_packets.contexts import PacketEngine
from agentjax.recipes.kv_packets.lessons import LessonsConfig
from agentjax.recipes.kv_packets.library import Library
from agentjax.recipes.kv_packets.store import PacketStore
from agentjax.text import Chat
from agentjax.tools.files_program import lines_of, numbered
from agentjax.training.likelihood import LikelihoodConfig

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment


@dataclasses.dataclass(unsafe_hash=True)
class PacketsConfig(LikelihoodConfig):
  """Contexts read known documents as packets; for ``config.likelihood``.

  Updates score all tokens from left to right and compute documents in full. The figures are ours.

  Attributes:
    corpus: JSONL files as the search tool reads them. The texts are known as they are, and as
      searches show them, with single blanks.
    files: text files, such as manuals and skills; known as they are, and as the tool "files" shows
      them, with numbers before the lines.
    least_tokens: shorter documents are read as text.
    adapter: file of header and trailer (``write_adapter``); None is neither.
    folder: where packets are kept and shared by processes; None keeps them in memory alone.
    memory_mb: MB (2^20 bytes) of packets in the memory of the host, beside the pages in use.
    recompute: documents are read as text, for comparison.
    lessons: what an adapter is trained on (``agentjax.recipes.kv_packets.train``).
  """

  corpus: tuple[FilePath, ...] = ()
  files: tuple[FilePath, ...] = ()
  least_tokens: PositiveInt = 32
  adapter: FilePath | None = None
  folder: FilePath | None = None
  memory_mb: PositiveInt = 1024
  recompute: bool = False
  lessons: LessonsConfig = dataclasses.field(default_factory=LessonsConfig)

  @property
  def in_order(self) -> bool:
    return True

  def check_run(self, experiment: Experiment, path: str) -> None:
    check(
      bool(self.corpus or self.files),
      f"{path}.corpus",
      self.corpus,
      f"JSONL files, unless {path}.files names text files",
    )
    engine, said = experiment.sampling_engine, f"with {path}={self.chosen!r}"
    plain: list[tuple[str, Any, Any]] = [
      ("engine.speculate", engine.speculate, "none"),
      ("engine.record_experts", engine.record_experts, False),
      ("engine.mesh.data", engine.mesh.data, 1),
      ("engine.mesh.expert", engine.mesh.expert, 1),
    ]
    if experiment.lora is not None:  # then all policies share one engine
      plain.append(("seats", tuple(experiment.seats), ()))
    for name, found, allowed in plain:
      check(found == allowed, f"config.{name}", found, f"{allowed!r} {said}")
    if experiment.pretrained is None:
      reason = unjoinable(experiment.model)
      check(reason is None, path, self.chosen, f"for a model without {reason}")

  def documents(self) -> list[Document]:
    """Those of ``corpus``."""
    return read_corpus(self.corpus) if self.corpus else []

  def library(self, chat: Chat) -> Library:
    """The documents, in the ids of a vocabulary.

    Raises:
      ConfigError, DataError: files that cannot be read.
    """
    library = Library()
    for text in self._texts():
      library.add_text(chat.tokenizer.encode, text, self.least_tokens)
    return library

  def engine(self, model: ModelConfig, config: EngineConfig, chat: Chat, **options: Any) -> Engine:
    adapter = None if self.adapter is None else self._read_adapter(self.adapter, model)
    folder = None if self.folder is None else pathlib.Path(self.folder)
    engine = Engine(model, dataclasses.replace(config, pieces=True), **options)
    store = PacketStore(self.memory_mb << 20, folder)
    packets = PacketEngine(engine, self.library(chat), store, adapter, recompute=self.recompute)
    return cast(Engine, packets)  # it has all that an engine has

  def _read_adapter(self, path: str, model: ModelConfig) -> Adapter:
    where = "config.likelihood.adapter"
    try:
      adapter = read_adapter(pathlib.Path(path))
    except (OSError, ValueError, KeyError) as error:
      raise ConfigError(
        f"{where}={path!r} cannot be read ({error}): write_adapter makes one."
      ) from error
    width = adapter.header.shape[-1]
    check(width == model.d_model, where, path, f"one of d_model={model.d_model}, not {width}")
    return adapter

  def _texts(self) -> list[str]:
    texts = [document.text for document in self.documents()]
    texts += [" ".join(text.split()) for text in texts]
    for path in self.files:
      try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
      except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read as text: {error}", path) from error
      lines = lines_of(text)
      texts += [text.strip(), numbered(lines, 1, len(lines))]
    return list(dict.fromkeys(texts))
