"""The answer key: questions (the experiments, their variants, answers and claims), policies (what is measured of one),
runs (a variant with a seed; kept, so that none is run twice), claims (what the figures of the runs bear out), drawings,
key (what is written).
"""
