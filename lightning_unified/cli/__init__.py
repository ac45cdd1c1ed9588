"""The commands train, plan, doctor, watch and report.

Hydra is imported in this package only.
"""
