"""The client side: the Flower app, the client's data and policy, and the tensors that it stores on its disk."""
