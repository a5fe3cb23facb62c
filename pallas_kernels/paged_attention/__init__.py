"""Attention over keys and values that lie in pages."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, REFUSALS, paged_attention
from pallas_kernels.paged_attention.quantised import QUANTISED, quantize, quantize_tokens

__all__ = [
  "IMPLEMENTATIONS",
  "QUANTISED",
  "REFUSALS",
  "paged_attention",
  "quantize",
  "quantize_tokens",
]
