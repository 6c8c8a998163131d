"""The client side: the Flower app, the client's data and policy, and what it keeps on its disk."""
