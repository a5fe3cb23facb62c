"""DiffusionNFT (2509.16117) with the rewards of RationalRewards (2604.11626), on small drawings."""
