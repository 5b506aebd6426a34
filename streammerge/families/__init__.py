"""What the model means: from stored tensors to the tensors of a Hugging Face folder."""
