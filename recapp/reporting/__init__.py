"""What a run leaves behind: one writer, all readers."""
