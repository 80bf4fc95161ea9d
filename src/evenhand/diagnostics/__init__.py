"""From trajectories and credits to the numbers that tell how a run is doing."""
