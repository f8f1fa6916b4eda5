"""Studies of a recipe on the machine at hand: many short runs in processes of their own, and what follows from their figures."""
