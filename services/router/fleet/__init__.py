"""What the router makes of its fleet by itself: bounds on loads, who is avoided, what was sent where."""
