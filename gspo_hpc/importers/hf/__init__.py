"""Parts of Hugging Face's trainers that TRL and ms-swift share."""
