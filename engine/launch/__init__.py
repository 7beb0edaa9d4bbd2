"""Start, place, watch and stop the parts of a run."""
