"""The draft service: a Drafter behind the Draft service. Holds soft state only."""
