"""What the memory does: two models token by token, the state taken away, and a look inside. And the report of it."""
