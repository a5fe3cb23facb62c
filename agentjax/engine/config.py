"""Settings of the sampling engine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from agentjax.config import Config, NonNegativeInt, PositiveInt, PositiveShare, Range, Share, check
from agentjax.schedules import Scheduled
from agentjax.sharding import MESH_AXES, MeshConfig


@dataclasses.dataclass(unsafe_hash=True)
class SamplingConfig(Config):
  """How a token is drawn. Log-probs and entropies are those of the untruncated distribution.

  The filters act in the order temperature, top-k, top-p, min-p; each is off at its default.

  Attributes:
    temperature: divides the logits; 0 is greedy, with log-probs and entropies at temperature 1.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: of what top-k left, keep the smallest set of mass at least top_p (1904.09751).
    min_p: drop tokens less probable than ``min_p`` times the most probable one (2407.01082).
  """

  temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
  top_k: Annotated[int, Range(0, 2**31, below=True)] = 0
  top_p: Scheduled[PositiveShare] = 1.0
  min_p: Scheduled[Share] = 0.0

  def validate(self, path: str = "sampling") -> None:
    super().validate(path)


@dataclasses.dataclass(unsafe_hash=True)
class EngineConfig(Config):
  """Sizes of the engine. All compiled shapes follow from them; none depends on the requests.

  Attributes:
    slots: live contexts on the device, over all lanes. Take a power of two for slots / lanes and
      for each of extend_buckets * extend_rows: XLA on CPU may round exponentials differently in the
      remainder of a vector loop, and a context's last bits would then depend on its slot.
    lanes: blocks of ``slots / lanes`` slots, spread over the engine's devices. Each lane runs in a
      thread of its own. Two lanes use two CPU cores; one small decode step uses hardly more than
      one.
    mesh: devices of each lane. Heads, hidden units and the vocabulary are split over ``tensor``,
      experts over ``expert``, slots over ``data`` and ``expert``. What does not divide is whole on
      every device, but experts and their hidden units are filled up with zeros. All lanes together
      take ``lanes`` times as many devices. ``fsdp`` and ``context`` stay 1.
    processes: whose devices make up a lane, for models that fit on no host: the devices of this
      many processes, one after the other, sample together, and ``mesh`` takes as many of each.
      The first of them plays the episodes of all; the others repeat what its lanes do.
    max_length: tokens a context can hold, prompt included; it may be the model's limit.
    cache_tokens: tokens whose keys and values the devices can hold, over all lanes. Slots, forks,
      prefixes and parked contexts share this room and take pages of ``block_tokens`` from it as
      they grow; it sets the memory used. 0 is ``slots * max_length``. Layers with a window have
      less room if that is enough for two windows a slot. Where room runs short, the longest
      unused pages move to the host; then contexts without a call, and those of the lowest priority,
      are parked.
    chunk_tokens: most tokens that a decode dispatch draws for an active slot. A context that stops
      early waits for the end of its chunk, and of the next one if that was dispatched ahead
      (``engine.pace``), so this trades host work against latency.
    extend_buckets: sizes of an extension in tokens, rising. A run of ids is right-padded to the
      smallest bucket that holds it; a longer run is cut into pieces of the largest.
    extend_rows: contexts one dispatch of each bucket extends.
    max_stop_ids: stop ids a request may name.
    host_turns: turns of the event loop that the programs woken by a chunk get before the next
      chunk, so that a context with a quick tool call does not miss a chunk.
    prefill_tokens: prompt and observation tokens that are taken in between two decode chunks;
      buckets count whole, and one dispatch is always made. The rest of a long prompt waits for the
      next gap, so that it does not stall other contexts.
    block_tokens: tokens of a page of keys and values, which contexts may share.
    pieces: contexts may begin with runs of tokens that were taken in by themselves
      (``Engine.open_pieces``), in pages that all of them share. All contexts then read their pages
      by ``packet_attention``. Not with several data or expert ways of a mesh, ``speculate`` or
      ``record_experts``.
    cache_dtype: keys, values and latents in 8 bits a number, with a float32 scale for each token
      and key head: "int8", or "fp8" (float8_e4m3fn). None is the model's compute dtype. Log-probs
      then differ more from the trainer's, see ``mismatch/max``.
    weight_dtype: matrices of the blocks in 8 bits a number, with a float32 scale for each output,
      in the lanes: "int8", or "fp8" (float8_e4m3fn). None is the model's compute dtype. Log-probs
      then differ more from the trainer's, see ``mismatch/max``.
    keep_base: with adapters, a lane keeps the weights below them while its devices train, and only
      the adapters are sent. False frees that memory for the update, and sends all in every step.
    device_store_mb, host_store_mb: MB (2^20 bytes) for contexts without a slot (parked ones, forks,
      prompts, known prefixes): their recurrent states, and the pages that do not fit in
      ``cache_tokens``. The longest unused ones move from the device to the host. When all slots are
      taken, the longest idle context is parked to let another run. When the store is full, known
      prefixes are dropped first; then no context is parked for a slot while any slot is at work.
    prefix_reuse: which beginnings are used again while the weights are the same. "none"; "prompts":
      prefilled prompts, and every prompt at multiples of ``snapshot_tokens``, with the same bits as
      without reuse; "turns": closed conversations too, at any boundary, equal up to rounding.
      Extension and decoding round differently, so with "turns" a sample may depend on what is
      known.
    snapshot_tokens: least distance between two such places in a prompt, rounded up to pieces of the
      largest bucket; each place costs a copy of the recurrent state.
    max_waiting: calls that may wait for a slot; one more is refused with EngineBusyError. 0 is no
      limit.
    record_experts: record what the routers chose for every token, so that training can choose the
      same (router replay, 2510.11370). One or two bytes a choice; see ``Context.experts``.
    grammar_states: rows of the table that masks logits (see ``engine.grammar``), shared by all
      grammars at work; 0 is off and costs nothing. Grammars take tens to thousands of states.
    grammar_classes: kinds of tokens that one grammar may tell apart, columns of that table.
    grammars: most grammars in the table. If more are at work, they take turns.
    speculate: "ngram" drafts the next tokens from the context's own past, "mtp" draws them from the
      model's prediction heads (model.mtp); one step of the model checks them all. "none" drafts
      nothing. Tokens and log-probs change by rounding only. It pays if a step costs little more for
      several tokens than for one (an accelerator that waits for its memory) and the drafts are
      right: repetitive text, or trained heads. See docs/rollout.md.
    draft_tokens: tokens of a draft. Take one less than a power of two, see ``slots``. If they are
      more than model.mtp.depths, "mtp" repeats the last depth of the heads.
    warmup: compile all programs when the first weights are published. Otherwise each is compiled
      when first needed, and several lanes may compile it twice.
  """

  slots: PositiveInt = 64
  lanes: PositiveInt = 1
  mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(fsdp=1))
  processes: PositiveInt = 1
  max_length: PositiveInt = 512
  cache_tokens: NonNegativeInt = 0
  chunk_tokens: PositiveInt = 16
  extend_buckets: tuple[int, ...] = (16, 64, 256)
  extend_rows: tuple[int, ...] = (16, 4, 1)
  max_stop_ids: PositiveInt = 4
  host_turns: NonNegativeInt = 16
  prefill_tokens: PositiveInt = 1024
  block_tokens: PositiveInt = 64
  pieces: bool = False
  cache_dtype: Literal["int8", "fp8"] | None = None
  weight_dtype: Literal["int8", "fp8"] | None = None
  keep_base: bool = True
  device_store_mb: NonNegativeInt = 1024
  host_store_mb: NonNegativeInt = 4096
  prefix_reuse: Literal["none", "prompts", "turns"] = "prompts"
  snapshot_tokens: PositiveInt = 1024
  max_waiting: NonNegativeInt = 0
  record_experts: bool = False
  grammar_states: Annotated[int, Range(0, 2**15, below=True)] = 0
  grammar_classes: Annotated[int, Range(1, 2**15, below=True)] = 512
  grammars: Annotated[int, Range(1, 2**15, below=True)] = 8
  speculate: Literal["none", "ngram", "mtp"] = "none"
  draft_tokens: PositiveInt = 3
  warmup: bool = True

  def validate(self, path: str = "engine") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(self.slots % self.lanes == 0, "lanes", f"a divisor of {path}.slots={self.slots}")
    for axis in MESH_AXES:
      size, split = getattr(self.mesh, axis), axis in ("data", "expert", "tensor")
      allowed = "a number of devices, at least 1" if split else "1: nothing is split over it here"
      check(size >= 1 if split else size == 1, f"{path}.mesh.{axis}", size, allowed)
    ways = self.mesh.data * self.mesh.expert
    require(
      self.slots // self.lanes % ways == 0,
      "slots",
      f"a multiple of lanes * mesh.data * mesh.expert = {self.lanes * ways}",
    )
    require(
      self.mesh.size % self.processes == 0,
      "processes",
      f"a divisor of the devices of a lane ({path}.mesh), {self.mesh.size}",
    )
    require(self.processes == 1 or not self.pieces, "pieces", f"False with {path}.processes > 1")
    least = self.block_tokens * self.lanes * ways
    require(
      self.cache_tokens == 0 or self.cache_tokens >= least,
      "cache_tokens",
      f"0, or at least a page of {path}.block_tokens={self.block_tokens} tokens for each of the "
      f"lanes * mesh.data * mesh.expert = {self.lanes * ways} parts",
    )
    buckets = self.extend_buckets
    require(
      bool(buckets) and buckets[0] >= 1 and list(buckets) == sorted(set(buckets)),
      "extend_buckets",
      "one or more rising positive integers",
    )
    require(
      len(self.extend_rows) == len(buckets) and min(self.extend_rows) >= 1,
      "extend_rows",
      f"one positive integer for each of {path}.extend_buckets={buckets}",
    )
