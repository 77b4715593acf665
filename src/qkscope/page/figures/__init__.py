"""Results as PNG and PDF: the style that all figures share (`style`), and the verbs' own (`pictures`)."""
