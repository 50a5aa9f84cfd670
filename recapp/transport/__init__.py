"""How messages get from one rank to the others: the only room with collectives."""
