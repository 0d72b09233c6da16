"""Messages to people about a run: where they go, what they tell, and how they are sent."""
