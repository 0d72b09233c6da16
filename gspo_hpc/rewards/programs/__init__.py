"""Programs that the model wrote: taken out of a completion, tested in the sandbox, and graded."""
