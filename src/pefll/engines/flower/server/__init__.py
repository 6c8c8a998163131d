"""The server side: the engine, its requests to clients, and checks of their replies."""
