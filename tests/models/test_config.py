import dataclasses

import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"pattern": "M*Q"}, r"pattern='M\*Q'; allowed: .*'E'"),
    ({"pattern": ""}, "pattern=''"),
    ({"num_heads": 6, "num_kv_heads": 4}, "num_kv_heads=4; allowed: a divisor of num_heads=6"),
    ({"head_dim": 7, "rope_theta": 1e4}, "rope_theta=10000.0.*even head_dim"),
    ({"mamba_heads": 6, "mamba_groups": 4}, "mamba_groups=4"),
    ({"experts_per_token": 9, "num_experts": 8}, "experts_per_token=9.*num_experts=8"),
    ({"dt_min": 0.2, "dt_max": 0.1}, "dt_min=0.2"),
    ({"dt_limit_low": 0.5, "dt_limit_high": 0.1}, "dt_limit_low=0.5"),
    ({"d_model": 0}, "d_model=0"),
    ({"conv_kernel": 1}, "conv_kernel=1"),
    ({"compute_dtype": "float16"}, "compute_dtype='float16'"),
    ({"d_shared_expert": -1}, "d_shared_expert=-1"),
  ],
)
def test_an_impossible_setting_is_refused_by_name(changes, message):
  config = dataclasses.replace(ModelConfig(), **changes)
  with pytest.raises(ConfigError, match=f"config.model.{message}"):
    config.validate("config.model")


def test_a_config_survives_json(tiny):
  assert ModelConfig.from_dict(tiny.to_dict()) == tiny
