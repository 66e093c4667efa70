"""Auditing the tests: entries (a wrong or right solution, as a change to the reference), task1 to task5 (the mistakes
and variations of each task), catalogue (all of them, and combinations), verdicts (what the tests made of an entry),
worker (the process that runs the tests), runner (every entry, in parallel), report (what is printed).
"""
