"""Bytes of text that end lines, and numbers that say what a text lacks; `compiled_text.py` reads text
by them, and needs numba, which those who only open files do without.
"""

LINE_FEED = ord("\n")
RETURN = ord("\r")
NO_QUOTE = -1  # the quote of text in which no character quotes others
UNCLOSED = -1  # the number of fields of a row whose quote never ends
