"""The Hugging Face folder: what lies beside the weights, staging, and the one commit point."""
