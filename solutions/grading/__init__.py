"""Grading: submissions (what was handed in), exam (the tests and what they are worth), worker (in the process of the
student's code), process (the same from outside), wire (what goes through its door), confinement (what the system keeps
it from), examination (one submission's grade), book (what is written).
"""
