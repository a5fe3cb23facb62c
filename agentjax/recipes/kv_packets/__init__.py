"""KV Packet (2604.13226): documents that were computed once drop into any context.

A packet is what the frozen model leaves in an empty slot after a header, a document and a trailer:
keys and values of every attention layer, rotated from position 0 on, and of every Mamba-2 layer the
map that the document makes of a state. Header and trailer are a few input embeddings, one pair for
a model (``adapter.Adapter``). Packets of any order are joined in front of what is asked; nothing of
them is computed again but for the first taps of each convolution.

* ``packet``: a packet, the key that says all it depends on, and the maker of packets of one model.
* ``store``: packets by key in memory and in a folder; a damaged or foreign file is never used.
* ``compose``: packets in a row as one slot of a cache.
* ``questions``, ``training``: an adapter learns that a model answers behind packets as behind text.
* ``methods``: the same documents whole, joined, or computed again in part, to compare with.
* ``library``, ``contexts``: known documents, and an engine whose contexts read them as packets.
* ``config``, ``report``: the same in a run, and what it tells of it; ``scores``: updates that read
  packets as the sampler did.
* ``reading``, ``lessons``, ``learn``: questions over real passages, as tasks and for an adapter;
  ``train`` is the command.

The general parts are in the core: ``models.pieces`` runs and joins pieces by ``BlockKind.join``
(keys are turned from where they were computed, in float32, never twice; states follow each other as
maps), ``models.pages.Pieces`` says where the pages of a row stand, and
``pallas_kernels.kv_packet`` reads them where they lie.

The paper has attention only; maps of Mamba-2 layers are ours.
"""

from agentjax.recipes.kv_packets.adapter import Adapter, init_adapter, read_adapter, write_adapter
from agentjax.recipes.kv_packets.compose import compose
from agentjax.recipes.kv_packets.config import PacketsConfig
from agentjax.recipes.kv_packets.contexts import PacketEngine
from agentjax.recipes.kv_packets.lessons import LessonsConfig
from agentjax.recipes.kv_packets.library import Library
from agentjax.recipes.kv_packets.packet import Packet, PacketError, PacketKey, PacketMaker
from agentjax.recipes.kv_packets.questions import Questions
from agentjax.recipes.kv_packets.reading import ReadingConfig
from agentjax.recipes.kv_packets.report import PacketReportConfig
from agentjax.recipes.kv_packets.store import PacketStore
from agentjax.recipes.kv_packets.training import AdapterTraining, train_adapter

__all__ = [
  "Adapter",
  "AdapterTraining",
  "LessonsConfig",
  "Library",
  "Packet",
  "PacketEngine",
  "PacketError",
  "PacketKey",
  "PacketMaker",
  "PacketReportConfig",
  "PacketStore",
  "PacketsConfig",
  "Questions",
  "ReadingConfig",
  "compose",
  "init_adapter",
  "read_adapter",
  "train_adapter",
  "write_adapter",
]
