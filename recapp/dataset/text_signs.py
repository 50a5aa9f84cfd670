"""Bytes of text that end lines, and numbers that say what a text lacks.

The compiled loops over text need numba; who only opens files imports these without it.
"""

LINE_FEED = ord("\n")
RETURN = ord("\r")
NO_QUOTE = -1  # the quote of text in which no character quotes others
UNCLOSED = -1  # the number of fields of a row whose quote never ends
