"""What server and clients share: the agreement, the message format, and names in messages."""
