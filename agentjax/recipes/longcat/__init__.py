"""LongCat-Flash-Thinking (2509.18883): experts of domains, fused into one model."""
