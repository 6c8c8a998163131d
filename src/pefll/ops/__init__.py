"""The operations that networks are made of, written for one client and mapped over many."""
