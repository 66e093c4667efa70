"""Measuring the lab: bench (where the time goes), beside_trl (the same beside TRL), calibration (what a run gives on
other machines), suite (the graded tests under other circumstances), kills (every command killed as it works), processes
(how the last two start programs, in copies of the lab).
"""
