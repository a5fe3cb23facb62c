"""Mamba-1's selective scan (arXiv 2312.00752)."""

from pallas_kernels.selective_scan.api import (
  IMPLEMENTATIONS,
  selective_scan,
  selective_scan_step,
)

__all__ = ["IMPLEMENTATIONS", "selective_scan", "selective_scan_step"]
