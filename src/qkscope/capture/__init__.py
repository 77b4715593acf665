"""Examples in, queries and keys out: the only room that touches a Hugging Face model."""
