r"""GRPO of an agent that searches passages of Wikipedia and reads what it finds as packets.

  export AGENTJAX_DATA=DIR
  python -m agentjax.train --config=configs/kv_packet_search.py --workdir=runs/search \
      --config.start_from=runs/reading
  python -m agentjax.train --config=configs/kv_packet_search.py --workdir=runs/search_text \
      --config.start_from=runs/reading --config.likelihood.recompute=True

The policy is that of configs/kv_packet_reading.py. A question comes with two passages; the tool
"search" finds more. Whatever stands in the prompt or in a result and is a passage of the corpus is
read as a packet: ``packets/tokens`` says how many tokens an episode did not compute, and
``mismatch/`` how far the sampler then was from the trainer, which computes everything. The second
command computes everything in the sampler as well, and shows the mismatch without packets. The
ratio between the two policies is truncated (TIS), so that the gap does not enter the gradient
unseen. With --config.likelihood.train_on_packets=True the trainer reads packets as the sampler
does, and there is no gap. All figures are ours.

With an adapter: --config.likelihood.adapter=FILE. With a model that reads:
--config.pretrained=FOLDER --config.tokenizer.kind=huggingface instead of start_from.
"""

import pathlib

from agentjax.adapters.tools.search import SearchConfig
from agentjax.objectives import AdvantageConfig, MismatchConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.kv_packets import PacketReportConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("kv_packet_reading.py"))
  experiment.name = "kv_packet_search"
  experiment.supervised.steps = 0
  experiment.data.source.passages = 2
  experiment.tools = ToolsConfig(
    names=("search",),
    settings={
      "search": SearchConfig(
        corpus=experiment.likelihood.corpus, results=2, max_results=2, snippet_characters=700
      )
    },
  )
  experiment.engine.max_length = 2048
  experiment.rollout.max_turns = 3
  experiment.rollout.max_total_tokens = 2048
  experiment.rl = RLStage(
    steps=20,
    tasks_per_step=4,
    row_length=2048,
    microbatch_rows=4,
    old_log_probs="recomputed",
    objective=ObjectiveConfig(
      AdvantageConfig(),
      PolicyLossConfig(clip_high=0.28, mismatch=MismatchConfig(weight_level="token")),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2),
    signals=(PacketReportConfig(),),
  )
  return experiment
