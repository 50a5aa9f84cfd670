"""Transport of messages between ranks: the only package with collectives."""
