"""The memory and the time of engines beside that of the policy, and the sizes that all engines have."""
