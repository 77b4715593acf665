"""Lee et al. 2026, *Decomposing Query-Key Feature Interactions Using Contrastive Covariances*, arXiv 2602.04752."""
