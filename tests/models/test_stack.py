import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest_rows import by_sequence, pack

from agentjax import models
from agentjax.models.stack import Params, unstack
