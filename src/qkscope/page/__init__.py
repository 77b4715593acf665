"""Results as people see them: figures, and one offline page."""
