"""The records of a run as one object, and everything that follows from them."""
