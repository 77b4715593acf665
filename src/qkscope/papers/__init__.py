"""The papers' experiments: one function per figure, run -> Result. Drawing is bound to them by `registry`."""
