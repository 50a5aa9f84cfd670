"""Files of tests are not forced to the disk: a process that is killed loses nothing that it has
written, only a machine does. A training waits for it a dozen times.
"""

import os


def force_nothing():
    """Let `os.fsync` return at once, in this process and in those that it forks."""
    os.fsync = lambda number: None
