"""Everything that owns weights: servers, publishing, training, and the launcher of all parts."""
