"""What lasts from call to call, and who may use it: sessions, state, locks."""
