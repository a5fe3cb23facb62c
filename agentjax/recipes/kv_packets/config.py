"""How a run reads known documents as packets."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, cast

from jax import Array

from agentjax.adapters.tools.search import Document, read_corpus
from agentjax.config import ConfigError, FilePath, PositiveInt, Share, check
from agentjax.data.errors import DataError
from agentjax.engine import Engine, EngineConfig
from agentjax.models import ModelConfig
from agentjax.models.pieces import unjoinable
from agentjax.recipes.kv_packets.adapter import Adapter, read_adapter
from agentjax.recipes.kv_packets.contexts import PACKET_PLACES, PacketEngine
from agentjax.recipes.kv_packets.lessons import LessonsConfig
from agentjax.recipes.kv_packets.library import Library
from agentjax.recipes.kv_packets.scores import packet_scores
from agentjax.recipes.kv_packets.store import PacketStore
from agentjax.text import Chat
from agentjax.tools.files_program import lines_of, numbered
from agentjax.training.likelihood import LikelihoodConfig, ScoreTokens
from agentjax.trajectory.batch import Batch

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment


@dataclasses.dataclass(unsafe_hash=True)
class PacketsConfig(LikelihoodConfig):
  """Contexts read known documents as packets; for ``config.likelihood``.

  Updates compute documents in full, or read them as the sampler did. The figures are ours.

  Attributes:
    corpus: JSONL files as the search tool reads them. The texts are known as they are, and as
      searches show them, with single blanks.
    files: text files, such as manuals and skills; known as they are, and as the tool "files" shows
      them, with numbers before the lines.
    least_tokens: shorter documents are read as text.
    spare: room of a context beyond ``engine.max_length``, as a share of it, for headers, trailers
      and the ends of pages; documents that would take more are read as text.
    adapter: file of header and trailer (``write_adapter``); None is neither.
    folder: where packets are kept and shared by processes; None keeps them in memory alone.
    memory_mb: MB (2^20 bytes) of packets in the memory of the host, beside the pages in use.
    recompute: documents are read as text, for comparison.
    train_on_packets: updates read packets where the sampler did, header and trailer included; else
      they compute documents in full.
    lessons: what an adapter is trained on (``agentjax.recipes.kv_packets.train``).
  """

  corpus: tuple[FilePath, ...] = ()
  files: tuple[FilePath, ...] = ()
  least_tokens: PositiveInt = 32
  spare: Share = 0.5
  adapter: FilePath | None = None
  folder: FilePath | None = None
  memory_mb: PositiveInt = 1024
  recompute: bool = False
  train_on_packets: bool = False
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
    if self.train_on_packets and experiment.rl.steps:
      plain += self._plain_updates(experiment)
    for name, found, allowed in plain:
      check(found == allowed, f"config.{name}", found, f"{allowed!r} {said}")
    if experiment.pretrained is None:
      reason = unjoinable(experiment.model)
      check(reason is None, path, self.chosen, f"for a model without {reason}")

  def _plain_updates(self, experiment: Experiment) -> list[tuple[str, Any, Any]]:
    """Fields, with their values and those allowed, for updates that read packets."""
    rl = experiment.rl
    phases = enumerate(rl.all_phases)
    return [
      ("mesh.context", experiment.mesh.context, 1),
      ("rl.qk_clip", rl.qk_clip, None),
      ("rl.mtp_coefficient", rl.mtp_coefficient, 0),
      ("rl.balance_coefficient", rl.balance_coefficient, 0),
      *((f"rl.phases[{i}].context", phase.context, "episode") for i, phase in phases),
    ]

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

  def episodes(self, model: ModelConfig, chat: Chat) -> ScoreTokens | None:
    if not self.train_on_packets:
      return None
    return packet_scores(self._adapter(model), self.least_tokens)

  def marks(self, batch: Batch) -> Array:
    return batch.column(PACKET_PLACES.name)

  def engine(self, model: ModelConfig, config: EngineConfig, chat: Chat, **options: Any) -> Engine:
    adapter = self._adapter(model)
    folder = None if self.folder is None else pathlib.Path(self.folder)
    spare = 0 if self.recompute else int(self.spare * config.max_length)
    wider = dataclasses.replace(config, pieces=True, max_length=config.max_length + spare)
    engine = Engine(model, wider, **options)
    store = PacketStore(self.memory_mb << 20, folder)
    packets = PacketEngine(
      engine,
      self.library(chat),
      store,
      adapter,
      recompute=self.recompute,
      text_length=min(config.max_length, engine.max_tokens),
    )
    return cast(Engine, packets)  # it has all that an engine has

  def _adapter(self, model: ModelConfig) -> Adapter | None:
    where, path = "config.likelihood.adapter", self.adapter
    if path is None:
      return None
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
