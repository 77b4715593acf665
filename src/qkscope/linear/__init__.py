"""One linear engine."""
