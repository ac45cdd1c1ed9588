"""Parts of the fault and pressure campaigns: small exact modules, injected faults, runs in processes that may die."""
