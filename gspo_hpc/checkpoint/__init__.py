"""Saving and loading sharded state; conversion to and from Hugging Face folders."""

import gspo_hpc.policy  # noqa: F401  imports Megatron in its own way, before a module here does
