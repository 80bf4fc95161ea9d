"""A local page over the trajectories of a run, live or finished: an index and a small server."""
