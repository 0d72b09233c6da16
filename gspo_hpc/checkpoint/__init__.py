"""Saving and loading sharded state; conversion to and from Hugging Face folders."""
