"""Parts of the fault and pressure campaigns.

They are small exact modules, injected faults, and runs in processes that may die.
"""
