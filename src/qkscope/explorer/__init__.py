"""The live page: the only room that serves."""
