"""Mamba-2's state space dual scan (arXiv 2405.21060)."""

from pallas_kernels.ssd.api import IMPLEMENTATIONS, ssd, ssd_step

__all__ = ["IMPLEMENTATIONS", "ssd", "ssd_step"]
