"""Students as self-contained Hugging Face folders, and as models of that class in memory."""
