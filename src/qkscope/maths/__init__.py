"""Pure tensors: no model, no text, no files of a run. Imports nothing of ours but heads and errors."""
