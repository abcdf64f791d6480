"""Token slots of drafters with keys and values of their own: how many there are, and which session has which."""
