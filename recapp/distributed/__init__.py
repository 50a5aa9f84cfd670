"""The engine that executes any plan: the only room with collectives, and the launcher of ranks."""
