"""Megatron-Core: process groups, the model, its optimizer and schedule."""
