"""Training of draft heads for any target: data, features, losses, the loop, evaluation by real trees, export."""
