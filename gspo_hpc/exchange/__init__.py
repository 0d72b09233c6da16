"""The data plane: samples, log-probs and choices of experts go only to the ranks that compute them."""
