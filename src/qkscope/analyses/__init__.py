"""The verbs: capture and maths together give a `Result`."""
