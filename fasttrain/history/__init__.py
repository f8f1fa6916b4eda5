"""What is read back out of run folders: how a run stands, what runs did, and what they tell of the next one; without torch."""
