"""What is asked of a loss, checked once, and what comes back: the ground floor."""
