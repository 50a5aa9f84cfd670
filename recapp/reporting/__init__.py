"""Explanations of plans before a run, and the writers and readers of the files of a run."""
