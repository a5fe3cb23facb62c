#!/usr/bin/env bash
# Checks and times every GPU kernel, a model, and whole steps of reinforcement learning, in one call
# on a machine with an NVIDIA GPU.
#
#   benchmarks/gpu_suite.sh            minutes; --tiny: sizes for a CPU, kernels interpreted
#   PYTHON=path/to/python benchmarks/gpu_suite.sh
#
# The Python is $PYTHON, or else python3; it needs what agentjax needs, and jax with CUDA. A markdown table goes to stdout, and gpu_suite.json to the folder $OUT where that is set.
# The exit status is not 0 when a kernel is wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# PyTorch, where it is there, has its share of the memory.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
exec "${PYTHON:-python3}" benchmarks/gpu_suite.py "$@"
