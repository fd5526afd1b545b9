"""The language model: one body for every family, mixer and TP size; reading and writing Hugging Face folders."""
