"""What this process knows of an episode: its turn tree, budgets and replayed turns."""
