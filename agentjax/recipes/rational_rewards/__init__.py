"""RationalRewards (2604.11626): critiques by aspect, as one number."""
