"""Prepared folders: preparing documents, reading them, and verifying them."""
