"""gspo_hpc: GSPO training of language models on Slurm, with Megatron-Core and colocated vLLM engines."""

__version__ = "0.1.0.dev0"
