"""Row rules (what an update does to a touched row), the one optimiser object that Lightning
sees, and learning-rate schedules.
"""
