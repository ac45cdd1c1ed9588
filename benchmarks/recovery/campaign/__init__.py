"""What the fault and the pressure campaign share: small exact modules, injected faults, and runs in processes that may die."""
