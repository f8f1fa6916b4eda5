"""What each acceleration gives on the machine at hand: switched off alone, and on alone from the plain baseline."""
