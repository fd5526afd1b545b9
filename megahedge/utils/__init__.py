"""Small helpers that know nothing of models, data or training."""
