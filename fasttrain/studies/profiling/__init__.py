"""Where a step's time goes on the machine at hand: what is measured, what is concluded, and what other cards would give."""
