"""The ids of samples that have none. Readers of logs need them before torch is imported."""

MISSING = -(2**63)
"""The id of a single-valued feature for a sample that has none; among int32 ids it is
`MISSING_INT32`, also the smallest number of its type.

Tables give this id row 0. A multi-valued feature has an empty bag instead.
"""
MISSING_INT32 = -(2**31)
