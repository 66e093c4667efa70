"""Grading: submissions (what was handed in), exam (the tests and what they are worth), worker (the process of the
student's code), wire (what goes through its door), confinement (what the system keeps it from), examination (one
submission's grade), book (what is written).
"""
