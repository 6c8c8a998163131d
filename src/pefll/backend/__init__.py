"""What networks are made of, with a client axis where there is a GPU."""
