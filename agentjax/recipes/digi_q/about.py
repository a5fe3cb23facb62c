"""What the recipe is: Digi-Q."""

from agentjax.recipes import Recipe

_CONFIG = "--config=configs/digi_q_frozen_lake.py"

RECIPES = (
  Recipe(
    name="Digi-Q",
    paper="2502.15760, texts about its code",
    changes=(
      "Offline: values of actions are learnt by temporal differences on features of a frozen "
      "backbone, which was fine-tuned to say whether an action changes what is seen. Of several "
      "actions that the policy draws, the one with the largest advantage is imitated if that is "
      "large enough; there is no policy gradient."
    ),
    commands=(
      f"python -m agentjax.train {_CONFIG} --workdir=runs/logged",
      f"python -m agentjax.recipes.digi_q.record {_CONFIG} \\\n"
      "  --checkpoint=runs/logged --trajectories=runs/logged --output=runs/transitions \\\n"
      "  --record.compare='(?m)(^[PXOG_]+$\\n?)+' --record.shown_turns=1",
      "python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/backbone \\\n"
      "  --config.data.path=runs/transitions/representation --config.start_from=runs/logged",
      f"python -m agentjax.recipes.digi_q.learn {_CONFIG} \\\n"
      "  --transitions=runs/transitions --backbone=runs/backbone --output=runs/critic",
      f"python -m agentjax.recipes.digi_q.extract {_CONFIG} \\\n"
      "  --transitions=runs/transitions --critic=runs/critic --backbone=runs/backbone \\\n"
      "  --policy=runs/logged --output=runs/best",
      "python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/digi_q \\\n"
      "  --config.data.path=runs/best --config.start_from=runs/logged",
    ),
    tests=("tests/recipes/digi_q",),
    data="episodes that a run has logged; here FrozenLake without slipping, in text, in the place "
    "of phones and shops in screenshots",
    figures="not measured",
    ours="all that reads screenshots: an action changes what is seen if the text of the "
    "observation differs; the block whose output is read; sizes, rates and updates of the heads; "
    "which target head each head learns from; the scaling of features",
    missing="the features of images beside those of the backbone",
    page="digi_q.md",
  ),
)
