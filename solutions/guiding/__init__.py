"""The TRL guide, run: document (what is read from it: a notebook, single blocks, files that they write), tiny_model (in
place of the one that part 7 downloads), running (the environment that it needs, and its blocks and tests, run).
"""
