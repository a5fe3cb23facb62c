"""RationalRewards (2604.11626): critiques by aspect, and one number of them."""
