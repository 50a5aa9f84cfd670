"""Plans explained before a run, and the files that a run leaves: one writer, all readers."""
