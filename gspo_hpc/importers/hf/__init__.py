"""What the trainers of TRL and ms-swift have from Hugging Face's."""
