"""Platforms: imports of Megatron without the compiler, the CPU in the place of GPUs, sums over ranks in their order."""
