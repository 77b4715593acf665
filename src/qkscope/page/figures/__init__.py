"""Drawings of results: Result -> figure files and the page, by experiment."""
