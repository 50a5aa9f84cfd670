"""Transport of messages between ranks: the only room with collectives."""
