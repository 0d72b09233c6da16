"""The symptoms that `gspo-hpc diagnose` knows; every file here is discovered."""
