"""Models with known features: where every method, and every control, is proved."""
