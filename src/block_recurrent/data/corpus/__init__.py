"""Prepared folders: making them from documents, reading them, and checking them."""
