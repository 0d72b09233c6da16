"""The GPUs of a machine: how many, MIG, memory errors, who else uses them."""
