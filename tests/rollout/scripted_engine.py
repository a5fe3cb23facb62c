"""An engine without a model: every turn is a list of ids written down beforehand."""

import asyncio
import collections
from types import MappingProxyType

import numpy as np

from agentjax.engine import ContextLengthError, Finish, Sample
from agentjax.rollout import keys
from agentjax.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.special.end
CALL = TOKENIZER.special.call
RUN_SEED = 7


def say(text, *, call=None, end=True):
  """Ids of a turn: text, then a call if there is one, then ``<|end|>`` unless it is cut off."""
  ids = TOKENIZER.encode(text)
  if call is not None:
    ids += [CALL, *TOKENIZER.encode(call)]
  return ids + [END] * end


class ScriptedEngine:
  """Has the asyncio face of ``agentjax.engine.Engine``.

  Args:
    script: (address, turn) -> ids the policy draws, or an exception to raise.
    max_length: tokens a context holds.
    delay: address -> seconds one model call takes, for endings in any order.
    entropy: (address, turn) -> entropy of every token drawn; None gives rising ones.

  A context that was forked belongs to whoever's key its calls carry: samples -64 to 63 of its task.

  Attributes:
    prefills: how often each prompt was run, by its ids.
    live_prefixes, live_contexts: what was opened and not given back.
    most_contexts: largest number of contexts that lived at once.
    seen: address -> ids of its context at its last model call.
    requests: all (address, turn, SampleRequest), in the order they came.
  """

  def __init__(
    self, script, *, max_length=10_000, delay=lambda address: 0.0, version=3, entropy=None
  ):
    self.script, self.max_length, self.delay, self.version = script, max_length, delay, version
    self.entropy = entropy
    self.prefills = collections.Counter()
    self.live_prefixes = self.live_contexts = self.most_contexts = 0
    self.seen, self.requests = {}, []

  async def prefill(self, token_ids, *, priority=()):
    await asyncio.sleep(0.001)
    self.check_length(len(token_ids))
    self.prefills[tuple(token_ids)] += 1
    self.live_prefixes += 1
    return _Prefix(self, list(token_ids))

  async def open(self, prefix, *, priority=()):
    assert prefix.live, "opened from a prefix that was released"
    self.live_contexts += 1
    self.most_contexts = max(self.most_contexts, self.live_contexts)
    return _Context(self, priority, prefix.ids)

  async def open_ids(self, token_ids, *, priority=()):
    self.check_length(len(token_ids))
    self.live_contexts += 1
    context = _Context(self, priority, list(token_ids))
    context.turn = 1 + max((t for a, t, _ in self.requests if a == priority), default=-1)
    return context

  def check_length(self, length):
    if length > self.max_length:
      raise ContextLengthError(f"{length} tokens; allowed: engine.max_length={self.max_length}.")


class _Prefix:
  def __init__(self, engine, ids):
    self.engine, self.ids, self.live = engine, ids, True

  def release(self):
    self.engine.live_prefixes -= self.live
    self.live = False


class _Context:
  columns = MappingProxyType({})  # there is no router

  def __init__(self, engine, address, ids):
    self.engine, self.address, self.ids = engine, address, list(ids)
    self.turn, self.live, self.forked = 0, True, False

  def __len__(self):
    return len(self.ids)

  async def extend(self, token_ids):
    assert self.live
    self.engine.check_length(len(self.ids) + len(token_ids))
    self.ids += list(token_ids)

  async def fork(self, count):
    assert self.live
    await asyncio.sleep(0)
    forks = [_Context(self.engine, self.address, self.ids) for _ in range(count)]
    for fork in forks:
      fork.turn, fork.forked = self.turn, True
    self.engine.live_contexts += count
    return forks

  def find_owner(self, request):
    step, task, _ = self.address
    for sample in range(-64, 64):
      address = (step, task, sample)
      if (keys.turn_key(RUN_SEED, address, self.turn) == request.key_data).all():
        self.address, self.forked = address, False
        return
    raise AssertionError("a forked context is used with the key of no episode")

  async def generate(self, request):
    assert self.live
    if self.forked:
      self.find_owner(request)
    self.engine.seen[self.address] = list(self.ids)
    self.engine.requests.append((self.address, self.turn, request))
    await asyncio.sleep(self.engine.delay(self.address))
    drawn = self.engine.script(self.address, self.turn)
    if isinstance(drawn, Exception):
      raise drawn
    room = min(request.max_tokens, self.engine.max_length - len(self.ids))
    ids = np.array(drawn[:room], np.int32)
    self.turn += 1
    self.ids += ids.tolist()
    n = len(ids)
    if n and ids[-1] in request.stop_ids:
      finish = Finish.STOP
    else:
      finish = Finish.LENGTH if room == request.max_tokens else Finish.CONTEXT_FULL
    return Sample(
      token_ids=ids,
      behaviour_log_probs=-np.linspace(0.1, 0.9, n, dtype=np.float32),
      entropies=np.linspace(0.2, 1.0, n, dtype=np.float32)
      if self.engine.entropy is None
      else np.full(n, self.engine.entropy(self.address, self.turn - 1), np.float32),
      sampling_log_probs=np.zeros(n, np.float32),
      versions=np.full(n, self.engine.version, np.int32),
      finish=finish,
    )

  def close(self):
    self.engine.live_contexts -= self.live
    self.live = False
