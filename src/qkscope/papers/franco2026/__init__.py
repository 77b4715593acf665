"""*Singular Vectors of Attention Heads Align with Features*, 2026: one file per kind of figure."""
