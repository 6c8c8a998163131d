"""How the clients are reached."""
