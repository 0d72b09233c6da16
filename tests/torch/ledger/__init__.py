"""A ledger of GPU memory: the real loop, turns and engine object over cards that only count what is put on them."""
