"""Math-Shepherd (2312.08935): labels of steps by completions that are played from them."""
