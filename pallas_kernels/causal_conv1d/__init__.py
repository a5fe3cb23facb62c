"""Causal depthwise convolution over time, as in Mamba's short filter."""

from pallas_kernels.causal_conv1d.api import IMPLEMENTATIONS, causal_conv1d

__all__ = ["IMPLEMENTATIONS", "causal_conv1d"]
