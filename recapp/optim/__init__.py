"""Row rules (the update of one touched row), the one optimiser object that Lightning sees, and
learning-rate schedules.
"""
