"""One rank: bring-up, the training loop, its observers."""
