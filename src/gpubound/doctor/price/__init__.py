"""What a stall costs: the recorded steps are replayed without it."""
