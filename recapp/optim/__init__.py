"""What happens to a touched row, the one optimiser object that Lightning sees, and learning-rate
schedules.
"""
