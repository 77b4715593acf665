"""Pictures of the verbs, of discovery and of nano training, and the style that all figures share (`style`)."""
