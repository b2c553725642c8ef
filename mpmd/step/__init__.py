"""Steps in each of their states: jitted, lowered, planned, loaded, submitted."""
