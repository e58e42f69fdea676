"""Reading and writing files: written whole or not at all, and checked before anything is made of them."""
